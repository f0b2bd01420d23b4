"""What the lowerings of Triton templates share: operands as the kernels read them, grids."""

from __future__ import annotations

from .._torch import lowering as inductor


def arguments(*tensors):
    """Realised, contiguous and 16-byte aligned."""
    return tuple(inductor.contiguous(t) for t in tensors)


def gemv_grid(m, n, meta, *, cdiv):
    return (cdiv(n, meta["BLOCK_N"]), cdiv(m, meta["BLOCK_M"]), 1)


def mid_grid(m, n, meta, *, cdiv):
    return (cdiv(n, meta["BLOCK_N"]) * cdiv(m, meta["BLOCK_M"]), 1, 1)
