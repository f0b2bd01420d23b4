"""Kernels of ``fp4.moe``."""
