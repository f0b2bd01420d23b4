"""F2: kernels. ``table`` holds the dispatch rows, ``select`` picks one (pure), the op folders hold the launchers.

Importing this package attaches the CPU and CUDA implementations to ``torch.ops.fp4``; Triton is imported at the first
CUDA call, never before.
"""

from . import register  # noqa: F401
