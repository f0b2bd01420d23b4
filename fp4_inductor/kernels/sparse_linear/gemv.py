"""triton_sparse_gemv: one row of fp4.sparse_linear, bound by memory. Source: :mod:`.triton_sparse_gemv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import forms
from ..forms import Problem, Size, Triton, rows_grid, scale_bounds
from ..kernel import COMPILED, MEASURED, Kernel, On


@dataclass(frozen=True)
class GemvConfig:
    """``block_n`` rows of the weight, ``block_w`` scale blocks of 16 k a step."""

    block_n: int
    block_w: int
    num_warps: int


def tile(p: Problem) -> GemvConfig:
    """For one row; further rows take further programs. Untimed: the dense kernel's with the same k a step."""
    return GemvConfig(16 if p.n >= 8192 else 8, 128 if p.k >= 2048 else 64 if p.k >= 1024 else 32, 4)


def others(p: Problem) -> list[GemvConfig]:
    return [GemvConfig(bn, bw, w) for bn in (4, 8, 16) for bw in (64, 128, 256) for w in (4, 8) if bw * 16 <= p.k and bn * bw >= 64 * w]


def constants(c: GemvConfig, p: Problem) -> dict[str, Any]:
    even = p.n % c.block_n == 0 and (p.k // 16) % c.block_w == 0
    shape = dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=p.arch >= 89, ASM=forms.ASM)
    return dict(**shape, **scale_bounds(p.bounds), num_warps=c.num_warps, num_stages=2)


FORM = Triton(
    "sparse_linear.triton_sparse_gemv:sparse_gemv", "fp4_sparse_linear_gemv", ("X", "VALUES", "META", "SCALE", "GLOBAL_SCALE"),
    (Size("M", "X", 0), Size("N", "VALUES", 0), Size("B", "SCALE", 1)), rows_grid, tile, others, constants,
)  # fmt: skip

_WHY = "reads kept codes and gathers their activations: 22% fewer bytes than dense weights"
_WHY_90 = (
    "reads kept codes, 22% fewer bytes, and gathers activations: 5.4 us at N = K = 4096, where cuda_sparse_small takes 6.3, but 20.1 for 16.1 at N = K = 8192"
)
KERNELS = (
    Kernel(
        "sparse_linear", "triton_sparse_gemv", "gemv", (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)), form=FORM
    ),
)  # fmt: skip
