"""Tile shapes; those of the Triton kernels as pure functions of the shape, so that eager and compiled calls agree.

Untimed: the dense kernels' tiles with the same k per step, where they compile without spills for sm_80 to sm_121.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..linear import configs as dense
from ..linear.configs import MidConfig, WideFP8Config

__all__ = [
    "GemvConfig",
    "MidConfig",
    "SparseSmallConfig",
    "SparseTableConfig",
    "SparseWideConfig",
    "WideFP8Config",
    "gemv",
    "gemv_choices",
    "gemv_constants",
    "mid",
    "mid_choices",
    "mid_constants",
]


@dataclass(frozen=True)
class GemvConfig:
    """``block_w``: scale blocks of 16 k a step."""

    block_n: int
    block_w: int
    num_warps: int


@dataclass(frozen=True)
class SparseSmallConfig:
    """Tile of ``csrc/sparse/sparse_linear_small.cu``: 16 * rows_16 rows of the weight a block, K split over warps, then over ``splits`` blocks."""

    rows_16: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class SparseTableConfig:
    """Tile of ``csrc/sparse/sparse_linear_table.cu``: 16 * sets rows of the weight a block, 16 * sets_a_warp a warp, K split over ``k_groups`` warps,
    in steps of 128 * ``substeps``: 2, a warp's, or 4, of two warps, so that ``k_groups`` is even."""

    sets: int
    sets_a_warp: int
    k_groups: int
    substeps: int = 2


@dataclass(frozen=True)
class SparseWideConfig:
    """Tile of ``csrc/sparse/sparse_linear_wide.cu``: ``rows`` of the weight and ``tokens`` a block, ``k_groups`` warpgroups for each 64 rows, which
    share K, and ``splits`` blocks of a cluster, which share K; 0: two blocks, of neighbouring rows, share the activations."""

    rows: int
    tokens: int
    k_groups: int
    splits: int = 1


def gemv(n: int, k: int) -> GemvConfig:
    """For one row; further rows take further programs."""
    return GemvConfig(16 if n >= 8192 else 8, 128 if k >= 2048 else 64 if k >= 1024 else 32, 4)


def gemv_choices(n: int, k: int) -> list[GemvConfig]:
    """What max-autotune benchmarks: the default first."""
    default = gemv(n, k)
    others = [GemvConfig(bn, bw, w) for bn in (4, 8, 16) for bw in (64, 128, 256) for w in (4, 8) if bw * 16 <= k and bn * bw >= 64 * w]
    return [default, *[c for c in others if c != default]]


def gemv_constants(c: GemvConfig, n: int, k: int, arch: int, bounds: tuple[int, ...] = ()) -> dict[str, object]:
    """Constexpr arguments of ``sparse_gemv`` for one shape and architecture; ``bounds``: see :func:`.linear.configs.scale_bounds`."""
    even = n % c.block_n == 0 and (k // 16) % c.block_w == 0
    return dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=arch >= 89, ASM=True, **dense.scale_bounds(bounds))


def mid(m: int, n: int, k: int) -> MidConfig:
    """For about ``m`` rows (an upper bound or a hint; any number of rows is right)."""
    if m > 32 and n <= 4096:
        return MidConfig(64, 32, 128, 4, 3)  # the dense tile's BLOCK_K = 256 spills here
    return dense.mid(min(m, 64), n, k)


def mid_choices(m: int, n: int, k: int) -> list[MidConfig]:
    """What max-autotune benchmarks: the default first."""
    default = mid(m, n, k)
    others = [MidConfig(default.block_m, bn, bk, 4, s) for bn in (32, 64) for bk in (64, 128) for s in (2, 3, 4)]
    return [default, *[c for c in others if c != default]]


mid_constants = dense.mid_constants
