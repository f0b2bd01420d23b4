"""Tiles of ``linear_w4a4``: what compiles without spills, by architecture; not measured.

tcgen05 (sm_100 to 119) takes 128 rows a block or more, its sums lie in tensor memory; mma.sync (sm_120 on) keeps them in registers.
"""

from __future__ import annotations

from ..linear.configs import MidConfig

_TCGEN05 = (MidConfig(128, 128, 256, 8, 3), MidConfig(128, 256, 256, 8, 3), MidConfig(128, 64, 256, 4, 4))
_MMA_SYNC = (MidConfig(128, 128, 128, 8, 3), MidConfig(128, 64, 128, 4, 3), MidConfig(64, 128, 128, 4, 3), MidConfig(64, 64, 256, 4, 3))


def choices(m: int, n: int, arch: int) -> list[MidConfig]:
    """What max-autotune benchmarks for about ``m`` rows: the default first."""
    tiles = _MMA_SYNC if arch >= 120 else _TCGEN05
    few = n * m <= 128 * 128 * 128  # fewer blocks of the first tile than such a GPU has multiprocessors: narrower ones
    default = tiles[2] if few else tiles[0]
    return [default, *(t for t in tiles if t != default)]


def constants(c: MidConfig, k: int, bounds: dict[str, int] | None = None) -> dict[str, object]:
    """Constexpr arguments of ``linear_w4a4`` for one K; ``bounds``: of ``linear.configs.scale_bounds``."""
    tile = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=k % c.block_k == 0, GROUP_N=c.group_n, NATIVE=True)
    return {**tile, **(bounds or {})}
