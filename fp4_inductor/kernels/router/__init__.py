"""Kernels of ``fp4.router``."""
