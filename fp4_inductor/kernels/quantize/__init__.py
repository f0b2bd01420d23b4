"""Kernels of ``fp4.quantize``: the search for block scales and the rounding to E2M1."""
