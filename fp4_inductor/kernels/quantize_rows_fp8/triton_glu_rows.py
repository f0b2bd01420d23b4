"""One program a row: ``act(gate) * up``, the maximum, then the rounded products. A row that is too long for registers is computed twice.

PDL: as in :mod:`.triton_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear_glu.triton_gemv_glu import activate
from .triton_rows import columns, inverse_of, larger, limited, scale_of


@triton.jit
def part(GATE, i, INNER, ACT: tl.constexpr, LANE_ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """float32 ``[BLOCK]``: the products from the ``i``-th block on."""
    at = i * BLOCK + tl.arange(0, BLOCK)
    k = columns(at, LANE_ORDER)
    gate = tl.load(GATE + k, mask=at < INNER, other=0.0).to(tl.float32)
    return activate(gate, ACT) * tl.load(GATE + INNER + k, mask=at < INNER, other=0.0).to(tl.float32)


@triton.jit
def store(OUT, i, INNER, y, inverse, LIMIT, BLOCK: tl.constexpr):
    at = i * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, limited(y * inverse, LIMIT).to(OUT.dtype.element_ty), mask=at < INNER)


@triton.jit
def quantize_glu_rows(
    GATE_UP, OUT, ROW_SCALE, INNER, LIMIT, ACT: tl.constexpr, LANE_ORDER: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    """BLOCKS: so many, one to four, make a row, and stay in registers; 0: they do not."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    GATE_UP += row * 2 * INNER
    OUT += row * INNER
    peak = tl.zeros((BLOCK,), tl.float32)
    if BLOCKS == 0:
        for i in range(tl.cdiv(INNER, BLOCK)):
            peak = larger(peak, part(GATE_UP, i, INNER, ACT, LANE_ORDER, BLOCK))
    else:
        y0 = part(GATE_UP, 0, INNER, ACT, LANE_ORDER, BLOCK)
        peak = larger(peak, y0)
        if BLOCKS > 1:
            y1 = part(GATE_UP, 1, INNER, ACT, LANE_ORDER, BLOCK)
            peak = larger(peak, y1)
        if BLOCKS > 2:
            y2 = part(GATE_UP, 2, INNER, ACT, LANE_ORDER, BLOCK)
            peak = larger(peak, y2)
        if BLOCKS > 3:
            y3 = part(GATE_UP, 3, INNER, ACT, LANE_ORDER, BLOCK)
            peak = larger(peak, y3)
    scale = scale_of(tl.max(peak, 0), LIMIT)
    inverse = inverse_of(scale)
    if BLOCKS == 0:
        for i in range(tl.cdiv(INNER, BLOCK)):
            store(OUT, i, INNER, part(GATE_UP, i, INNER, ACT, LANE_ORDER, BLOCK), inverse, LIMIT, BLOCK)
    else:
        store(OUT, 0, INNER, y0, inverse, LIMIT, BLOCK)
        if BLOCKS > 1:
            store(OUT, 1, INNER, y1, inverse, LIMIT, BLOCK)
        if BLOCKS > 2:
            store(OUT, 2, INNER, y2, inverse, LIMIT, BLOCK)
        if BLOCKS > 3:
            store(OUT, 3, INNER, y3, inverse, LIMIT, BLOCK)
    tl.store(ROW_SCALE + row, scale)
