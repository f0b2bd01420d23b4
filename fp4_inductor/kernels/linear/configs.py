"""Tile shapes of the Triton kernels: pure functions of the shape, so that eager and compiled calls agree.

Measured on an H200 (benchmarks/results/dense.csv, benchmarks/NOTES.md); the same tiles compile without spills for sm_80 to sm_121.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...formats.packing import MAX_SCALES
from ...ops.activation import activation_code


@dataclass(frozen=True)
class GemvConfig:
    block_m: int
    block_n: int
    block_w: int
    num_warps: int


@dataclass(frozen=True)
class MidConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_n: int = 8


@dataclass(frozen=True)
class SmallConfig:
    """Tile of ``csrc/gemm/linear_small.cu``: 16 * rows_16 rows of the weight a block, K split over warps. The kernel has its own choice."""

    rows_16: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TableConfig:
    """Tile of ``csrc/gemm/linear_table.cu``: 16 * sets rows of the weight a block, 16 * sets_a_warp a warp, K split over ``k_groups`` warps,
    ``substeps`` of which share a stage."""

    sets: int
    sets_a_warp: int
    k_groups: int
    substeps: int = 1


@dataclass(frozen=True)
class CudaWideConfig:
    """Tile of ``csrc/gemm/linear_wide.cu``: ``rows`` of the weight and ``tokens`` a block, ``k_groups`` warpgroups for each 64 rows, which share K,
    and ``splits`` blocks of a cluster, which share K; 0: blocks take equal shares of all tiles' steps; -1: two blocks share activations."""

    rows: int
    tokens: int
    k_groups: int
    splits: int = 1


@dataclass(frozen=True)
class WideFP8Config:
    """Tile of ``csrc/gemm/linear_wide_fp8.cu`` and ``csrc/sparse/sparse_linear_wide_fp8.cu``: ``tokens`` a block, ``splits`` clusters that share a tile's K;
    0: clusters take equal shares of all tiles' steps."""

    tokens: int
    splits: int


def gemv(max_m: int, n: int, k: int) -> GemvConfig:
    """For at most ``max_m`` rows (1 to 4; more rows take more programs)."""
    block_m = 1 if max_m <= 1 else 2 if max_m == 2 else 4
    block_w = 256 if k >= 2048 else 128 if k >= 1024 else 64
    if block_m == 1:
        return GemvConfig(1, 16 if n >= 8192 else 8, block_w, 4)
    return GemvConfig(block_m, 8, min(block_w, 128), 4)


def mid(m: int, n: int, k: int) -> MidConfig:
    """For about ``m`` rows (an upper bound or a hint; any number of rows is right)."""
    narrow = n <= 4096
    if m <= 16:
        return MidConfig(16, 32, 256, 4, 3) if n <= 8192 else MidConfig(16, 64, 128, 4, 3)
    if m <= 32:
        return MidConfig(32, 32 if narrow else 64, 128, 4, 3)
    if m <= 64:
        return MidConfig(64, 32, 256, 4, 3) if narrow else MidConfig(64, 64, 128, 4, 4)
    return MidConfig(128, 64, 64, 4, 3)  # only sm_80 to 88 come here; BLOCK_K = 128 spills there


def gemv_choices(max_m: int, n: int, k: int) -> list[GemvConfig]:
    """What max-autotune benchmarks: the default first."""
    default = gemv(max_m, n, k)
    others = [GemvConfig(default.block_m, bn, bw, w) for bn in (4, 8, 16) for bw in (256, 512) for w in (4, 8) if bw * 8 <= k and bn * bw >= 128 * w]
    return [default, *[c for c in others if c != default]]


def mid_choices(m: int, n: int, k: int) -> list[MidConfig]:
    """What max-autotune benchmarks: the default first."""
    default = mid(m, n, k)
    others = [MidConfig(default.block_m, bn, bk, 4, s) for bn in (64, 128) for bk in (64, 128) for s in (2, 3, 4)]
    return [default, *[c for c in others if c != default]]


def gemv_constants(c: GemvConfig, n: int, k: int, arch: int, bounds: tuple[int, ...] = ()) -> dict[str, object]:
    """Constexpr arguments of ``linear_gemv`` for one shape and architecture; ``bounds``: see :func:`scale_bounds`."""
    even = n % c.block_n == 0 and (k // 8) % c.block_w == 0
    return dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=arch >= 89, ASM=True, **scale_bounds(bounds))


def mid_constants(c: MidConfig, n: int, k: int, dtype: torch.dtype, bounds: tuple[int, ...] = ()) -> dict[str, object]:
    """Constexpr arguments of ``linear_mid`` for one shape; ``bounds``: see :func:`scale_bounds`."""
    even = n % c.block_n == 0 and k % c.block_k == 0
    constants = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=even, GROUP_N=c.group_n, BF16=dtype == torch.bfloat16, ASM=True)
    return {**constants, **scale_bounds(bounds)}


def scale_bounds(bounds: tuple[int, ...]) -> dict[str, int]:
    """The rows at which the second and the third of up to :data:`MAX_SCALES` siblings begin; none: one global scale for all."""
    b1, b2 = (*bounds, *(2**31 - 1 if bounds else 0,) * 2)[:2]
    return dict(B1=b1, B2=b2)


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does with its sums besides the bias: ``act(sums) * mul + residual``, or ``act(gate) * up``.

    Args:
        starts: the rows of W at which the second and the third global scale begin.
        act: ``""`` or an activation of ``fp4.linear_glu``.
        mul, residual: as the result, contiguous; a compiler passes its own kind of tensor.
    """

    starts: tuple[int, ...] = ()
    act: str = ""
    mul: Any = None
    residual: Any = None

    def arguments(self) -> tuple:
        """Of the operator, behind its tile, without defaults at the end."""
        given = [*self.starts, *[0] * (MAX_SCALES - 1 - len(self.starts)), activation_code(self.act), self.mul, self.residual]
        while given and (given[-1] is None or (isinstance(given[-1], int) and given[-1] == 0)):
            given.pop()
        return tuple(given)
