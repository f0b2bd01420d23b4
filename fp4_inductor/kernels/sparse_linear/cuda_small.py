"""The CUDA kernel of ``csrc/sparse/sparse_linear_small.cu`` (mma.sp), 1 to 32 rows."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor

from .. import csrc

MAX_M = 32
K_MULTIPLE = 32


@dataclass(frozen=True)
class SparseSmallConfig:
    """16 * rows_16 rows of the weight a block, K split over warps, then over ``splits`` blocks."""

    rows_16: int
    warps: int
    stages: int
    splits: int = 1


def linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: SparseSmallConfig | None = None
) -> Tensor:
    """``[M, N]`` on the current stream.

    Args:
        x: bfloat16 or float16 ``[M, K]``, 1 <= M <= 32 (16 on sm_86, 89, 120, 121), K % 32 == 0.
        values: uint8 ``[N, K/4]``, two kept codes a byte. meta: uint8 ``[N, K/8]``, all nibbles legal. scale: E4M3 ``[N, K/16]``.
        arch: compute capability times ten.
        tile: None: the kernel's choice.
    """
    return csrc.call("sparse_linear_small", x, (values, meta, scale), global_scale, bias, arch, astuple(tile) if tile else ())
