"""F2: kernels. ``kernel`` says what a kernel is, ``registry`` has all, ``choose`` prefers, ``select`` plans (pure), the op folders hold kernels and launchers.

Importing this package attaches the CPU and CUDA implementations to ``torch.ops.fp4``; Triton is imported at the first
CUDA call, never before.
"""

from . import register  # noqa: F401
