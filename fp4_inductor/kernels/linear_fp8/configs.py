"""Tiles of ``fp4.linear_fp8``: 16 bytes a thread and load, as in the NVFP4 GEMV; not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8GemvConfig:
    block_n: int
    block_k: int
    num_warps: int


def gemv(n: int, k: int) -> Fp8GemvConfig:
    """For a weight ``[n, k]``."""
    return Fp8GemvConfig(8, 1024 if k >= 1024 else 512 if k >= 512 else 256, 4)


def gemv_choices(n: int, k: int) -> list[Fp8GemvConfig]:
    """What max-autotune benchmarks: the default first."""
    default = gemv(n, k)
    others = [Fp8GemvConfig(bn, bk, 4) for bn in (4, 8, 16) for bk in (512, 1024) if bk <= max(k, 512)]
    return [default, *[c for c in others if c != default]]


def gemv_constants(c: Fp8GemvConfig, n: int, k: int, arch: int) -> dict[str, object]:
    """Constexpr arguments of ``linear_fp8_gemv`` for one shape and architecture."""
    return dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=n % c.block_n == 0 and k % c.block_k == 0, CVT=arch >= 89)
