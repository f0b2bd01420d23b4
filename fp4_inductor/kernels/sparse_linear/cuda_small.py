"""The CUDA kernels for few rows (mma.sp): ``csrc/sparse/sparse_linear_small.cu``, 1 to 32, and ``sparse_linear_table.cu``, 1 to 16 on sm_90."""

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


@dataclass(frozen=True)
class SparseTableConfig:
    """16 * sets rows of the weight a block, 16 * sets_a_warp a warp, K split over ``k_groups`` warps, in steps of 128 * ``substeps``."""

    sets: int
    sets_a_warp: int
    k_groups: int
    substeps: int = 2


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    arch: int,
    tile: SparseSmallConfig | SparseTableConfig | None = None,
    kernel: str = "sparse_linear_small",
) -> Tensor:
    """``[M, N]`` on the current stream.

    Args:
        x: bfloat16 or float16 ``[M, K]``, 1 <= M <= 32 (16 on sm_86, 89, 120, 121), K % 32 == 0; of ``"sparse_linear_table"`` M <= 16, K % 256 == 0, N >= 16.
        values: uint8 ``[N, K/4]``, two kept codes a byte. meta: uint8 ``[N, K/8]``, all nibbles legal. scale: E4M3 ``[N, K/16]``.
        arch: compute capability times ten.
        tile: None: the kernel's choice.
    """
    return csrc.call(kernel, x, (values, meta, scale), global_scale, bias, arch, astuple(tile) if tile else ())
