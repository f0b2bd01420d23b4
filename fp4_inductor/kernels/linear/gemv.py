"""triton_gemv: one to four rows of fp4.linear, bound by memory. Source: :mod:`.triton_gemv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import forms
from ..forms import Problem, Size, Triton, rows_grid, scale_bounds
from ..kernel import COMPILED, MEASURED, Kernel, On


@dataclass(frozen=True)
class GemvConfig:
    """``block_n`` rows of the weight by ``block_m`` activations, ``block_w`` words of eight codes a step."""

    block_m: int
    block_n: int
    block_w: int
    num_warps: int


def tile(p: Problem) -> GemvConfig:
    """For at most ``p.m`` rows, 1 to 4; more rows take more programs."""
    block_m = 1 if p.m <= 1 else 2 if p.m == 2 else 4
    block_w = 256 if p.k >= 2048 else 128 if p.k >= 1024 else 64
    if block_m == 1:
        return GemvConfig(1, 16 if p.n >= 8192 else 8, block_w, 4)
    return GemvConfig(block_m, 8, min(block_w, 128), 4)


def others(p: Problem) -> list[GemvConfig]:
    block_m = tile(p).block_m
    return [GemvConfig(block_m, bn, bw, w) for bn in (4, 8, 16) for bw in (256, 512) for w in (4, 8) if bw * 8 <= p.k and bn * bw >= 128 * w]


def constants(c: GemvConfig, p: Problem) -> dict[str, Any]:
    even = p.n % c.block_n == 0 and (p.k // 8) % c.block_w == 0
    shape = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=p.arch >= 89, ASM=forms.ASM)
    return dict(**shape, **scale_bounds(p.bounds), num_warps=c.num_warps, num_stages=2)


FORM = Triton(
    "linear.triton_gemv:linear_gemv", "fp4_linear_gemv", ("X", "QDATA", "SCALE", "GLOBAL_SCALE"),
    (Size("M", "X", 0), Size("N", "QDATA", 0), Size("K8", "QDATA", 1, over=4)), rows_grid, tile, others, constants,
)  # fmt: skip

_WHY = "bound by memory: dot products on packed words take 1.1-1.3x the time of reading the weight at M = 1; epilogues fuse behind it"
_WHY_90 = "one row where cuda_gemv is not compiled, does not take K, or the call is eager; a layer of an 8B model takes 69 us on an H100, with cuda_table 75"
KERNELS = (
    Kernel(
        "linear", "triton_gemv", "gemv", (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        batch=(1, "one row is summed in other pieces than 2 to 4"), tile_by_bound=True, form=FORM,
    ),
)  # fmt: skip
