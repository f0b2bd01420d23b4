"""Kernels of ``fp4.linear_fp8``: an E4M3 weight with one scale per output."""
