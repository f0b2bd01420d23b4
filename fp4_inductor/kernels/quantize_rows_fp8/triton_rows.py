"""One program a row: the maximum, then the rounded products with the scale's reciprocal. A row too long for registers is read twice, the second time from cache.

PDL (programmatic dependent launch, sm_90 on): as in :mod:`..moe.triton_decode`. A product behind it that is launched early fetches weights meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(peak, x):
    """``max(peak, |x|)``, NaN kept."""
    return tl.maximum(peak, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(amax, LIMIT):
    """As in the contract: divided, not approximated, 1 for a zero row and never subnormal."""
    scale = tl.maximum(tl.div_rn(amax, LIMIT), 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def limited(x, LIMIT):
    """Rounding may have lifted a product a hair above LIMIT."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_of(scale):
    """As in the contract: divided, not approximated."""
    return tl.div_rn(tl.full((), 1.0, tl.float32), scale)


@triton.jit
def columns(at, LANE_ORDER: tl.constexpr):
    """The k that lie at positions ``at`` of a row: ``ops.quantize_rows_fp8.in_lane_order``."""
    if LANE_ORDER:
        return at // 256 * 256 + at // 4 % 4 * 64 + at // 16 % 16 * 4 + at % 4
    else:
        return at


@triton.jit
def scale_of_row(X, row, K, LIMIT, BLOCK: tl.constexpr):
    peak = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        at = k + tl.arange(0, BLOCK)
        peak = larger(peak, tl.load(X + row * K + at, mask=at < K, other=0.0).to(tl.float32))
    return scale_of(tl.max(peak, 0), LIMIT)


@triton.jit
def quantize_rows(X, OUT, ROW_SCALE, K, LIMIT, LANE_ORDER: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):
    """WHOLE: K <= BLOCK, the row stays in registers."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if WHOLE:
        at = tl.arange(0, BLOCK)
        x = tl.load(X + row * K + columns(at, LANE_ORDER), mask=at < K, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(larger(tl.zeros((BLOCK,), tl.float32), x), 0), LIMIT)
        tl.store(OUT + row * K + at, limited(x * inverse_of(scale), LIMIT).to(OUT.dtype.element_ty), mask=at < K)
    else:
        scale = scale_of_row(X, row, K, LIMIT, BLOCK)
        inverse = inverse_of(scale)
        for k in range(0, K, BLOCK):
            at = k + tl.arange(0, BLOCK)
            x = tl.load(X + row * K + columns(at, LANE_ORDER), mask=at < K, other=0.0).to(tl.float32)
            tl.store(OUT + row * K + at, limited(x * inverse, LIMIT).to(OUT.dtype.element_ty), mask=at < K)
    tl.store(ROW_SCALE + row, scale)
