"""Tiles of ``fp4.linear_glu``: those of the GEMV over both halves, so that what was measured there holds here."""

from __future__ import annotations

from dataclasses import replace

from ...ops.activation import activation_code
from ..linear import configs
from ..linear.configs import GemvConfig


def gemv(n: int, k: int) -> GemvConfig:
    """For a weight ``[2 n, k]``; ``block_n`` counts rows of one half."""
    return _half(configs.gemv(1, 2 * n, k))


def gemv_choices(n: int, k: int) -> list[GemvConfig]:
    """What max-autotune benchmarks: the default first."""
    return [_half(c) for c in configs.gemv_choices(1, 2 * n, k)]


def gemv_constants(c: GemvConfig, n: int, k: int, arch: int, act: str, has_bias: bool, scales: int) -> dict[str, object]:
    """Constexpr arguments of ``linear_glu_gemv`` for one shape and architecture; ``scales``: 2 if gate and up have one each."""
    even = n % c.block_n == 0 and (k // 8) % c.block_w == 0
    tile = dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=arch >= 89, ASM=True)
    return {**tile, "ACT": activation_code(act), "HAS_BIAS": has_bias, "SCALE_STEP": scales - 1}


def _half(c: GemvConfig) -> GemvConfig:
    return replace(c, block_n=c.block_n // 2)
