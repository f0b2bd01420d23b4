"""triton_gemv_glu: one row of fp4.linear_glu by the GEMV's loop over rows of gate and of up. Source: :mod:`.triton_gemv_glu`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ...ops.activation import activation_code
from .. import forms
from ..forms import Problem, Size, Triton, rows_grid
from ..kernel import EMULATED, Kernel, On
from ..linear import gemv as linear
from ..linear.gemv import GemvConfig


def tile(p: Problem) -> GemvConfig:
    """That of the GEMV over both halves, so that what was measured there holds here; ``block_n`` counts rows of one half."""
    return _half(linear.tile(_both(p)))


def others(p: Problem) -> list[GemvConfig]:
    return [_half(c) for c in linear.others(_both(p))]


def _both(p: Problem) -> Problem:
    return p._replace(m=1, n=2 * p.n)


def _half(c: GemvConfig) -> GemvConfig:
    return replace(c, block_n=c.block_n // 2)


@functools.cache
def form(act: str, has_bias: bool, scales: int) -> Triton:
    """For ``act(gate) * up``; n of its problem is that of one half. ``scales``: 2 if gate and up have a global scale each."""

    def constants(c: GemvConfig, p: Problem) -> dict[str, Any]:
        even = p.n % c.block_n == 0 and (p.k // 8) % c.block_w == 0
        shape = dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_W=c.block_w, EVEN=even, CVT=p.arch >= 89, ASM=forms.ASM)
        return dict(**shape, ACT=activation_code(act), HAS_BIAS=has_bias, SCALE_STEP=scales - 1, num_warps=c.num_warps, num_stages=2)

    inputs, bias = ("X", "QDATA", "SCALE", "GLOBAL_SCALE"), ("BIAS",)
    return Triton(
        "linear_glu.triton_gemv_glu:linear_glu_gemv", f"fp4_linear_glu_gemv{'_bias' if has_bias else ''}", (*inputs, *(bias if has_bias else ())),
        (Size("M", "X", 0), Size("N", "QDATA", 0, over=2), Size("K8", "QDATA", 1, over=4)), rows_grid, tile, others, constants,
        absent=() if has_bias else bias,
    )  # fmt: skip


_WHY = "the GEMV's loop over rows of gate and of up, and their product: one launch, nothing stored in between"
KERNELS = (Kernel("linear_glu", "triton_gemv_glu", "gemv", (On(80, 129, EMULATED, _WHY),), form=replace(form("silu", False, 1), variant=form)),)
