"""Kernels of ``fp4.sparse_linear``: ``triton_*`` and ``cuda_*``, ``launch`` (the host side). On a CPU ``linear.cpu`` serves both."""
