"""Tile shapes of the Triton kernel: pure functions of the shape, so that eager and compiled calls agree.

Untimed: the dense GEMV's tiles with the same k per step, which compile without spills for sm_80 to sm_121.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemvConfig:
    """``block_w``: scale blocks of 16 k a step."""

    block_n: int
    block_w: int
    num_warps: int


def gemv(n: int, k: int) -> GemvConfig:
    """For one row; further rows take further programs."""
    return GemvConfig(16 if n >= 8192 else 8, 128 if k >= 2048 else 64 if k >= 1024 else 32, 4)


def gemv_choices(n: int, k: int) -> list[GemvConfig]:
    """What max-autotune benchmarks: the default first."""
    default = gemv(n, k)
    others = [GemvConfig(bn, bw, w) for bn in (4, 8, 16) for bw in (64, 128, 256) for w in (4, 8) if bw * 16 <= k and bn * bw >= 64 * w]
    return [default, *[c for c in others if c != default]]


def gemv_constants(c: GemvConfig, n: int, k: int, arch: int) -> dict[str, object]:
    """Constexpr arguments of ``sparse_gemv`` for one shape and architecture."""
    even = n % c.block_n == 0 and (k // 16) % c.block_w == 0
    return dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=arch >= 89, ASM=True)
