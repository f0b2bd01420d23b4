"""Kernels of ``fp4.dequantize`` and ``fp4.dequantize_fp8``: the transient weights of the many-rows paths."""
