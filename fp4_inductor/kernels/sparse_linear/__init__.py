"""Kernels of ``fp4.sparse_linear``: ``triton_*`` (CUDA), ``launch`` (the host side). On a CPU ``linear.cpu`` serves both."""
