"""Kernels of ``fp4.linear``: ``cpu`` (ATen), ``triton_*`` (CUDA), ``launch`` (the host side of the CUDA ones)."""
