"""Kernels of ``fp4.sparse_linear``."""
