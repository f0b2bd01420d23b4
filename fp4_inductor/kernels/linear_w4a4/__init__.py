"""Kernels of ``fp4.linear_w4a4``: both operands NVFP4, on FP4 tensor cores."""
