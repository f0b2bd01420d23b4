"""The loops over columns of :mod:`...formats.gptq`, bit for bit, on a GPU: one program works on a tile of rows, block of 16 columns after block.

All scales that are tried are one tile ``[16 columns, rows, scales]``. Columns are the first axis, which Triton keeps in the registers of one
thread where ``rows * scales`` covers the threads, so that no thread waits for another inside a block. The loop over columns stays a loop:
unrolled, the compiler loads all 16 rows of the factor at once, and spills (benchmarks/NOTES.md).

What earlier columns do to a block is taken from it when its turn comes, column after column in their order: the same subtractions in the same
order as where each column changes all later ones at once. Launch with ``enable_fp_fusion=False``: a product and a difference are rounded each by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize_rows_fp8.triton_rows import inverse_of
from ..quantize_rows_nvfp4.triton_blocks import block_code
from ..triton_common import e4m3_to_f32


@triton.jit
def column_of(x, here):
    """The one of the 16 columns of ``x [16, ...]`` that ``here`` marks. As integers, whose sum keeps the sign of a zero."""
    return tl.sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def of_trial(x, chosen):
    """``[16, rows]``: of ``x [16, rows, trials]`` the trial that ``chosen`` marks in each row; zeros where it marks none."""
    return tl.sum(tl.where(chosen, x.to(tl.int32, bitcast=True), 0), 2).to(tl.float32, bitcast=True)


@triton.jit
def to_scaled_grid(x, scale, divisor):
    """``formats.nvfp4.to_grid``. ``divisor``: the scale, or 1 if that is zero."""
    y = tl.div_rn(x, divisor)
    a = tl.minimum(tl.abs(y), 6.0)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    big = (exponent + 0x0B000000).to(tl.float32, bitcast=True)  # 2^22 times as large: its ulps are the grid's step
    magnitude = ((a + big) - big).to(tl.int32, bitcast=True)
    return (magnitude | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True) * scale


@triton.jit
def behind(X, FACTOR, CHANGED, first, rows, inside, WIDTH):
    """``X`` of the 16 columns from ``first`` on, less what the ``CHANGED`` of each column before them times its row of ``FACTOR`` takes from them."""
    column = tl.arange(0, 16)
    x = tl.load(X + rows[None, :] * WIDTH + first + column[:, None], mask=inside[None, :], other=0.0)
    for c in range(0, first):
        changed = tl.load(CHANGED + rows * WIDTH + c, mask=inside, other=0.0)
        factor = tl.load(FACTOR + c * WIDTH + first + column)
        x -= factor[:, None] * changed[None, :]
    return x


@triton.jit
def kept_of(KEEP, at, inside, KEPT: tl.constexpr):
    """Which weights of a block may be other than zero ``[16, rows, 1]``, as float32; without ``KEPT`` nobody reads it."""
    if KEPT:
        return tl.load(KEEP + at, mask=inside[None, :], other=0).to(tl.float32)[:, :, None]
    else:
        return tl.zeros((16, 1, 1), tl.float32)


@triton.jit
def round_panel(W, U, G, KEEP, Q, ERROR, CODES, N, WIDTH, KEPT: tl.constexpr, ROWS: tl.constexpr):
    """``formats.gptq.Panels.rounded`` of ``WIDTH`` columns, a multiple of 16. KEPT: there is a KEEP."""
    above = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    inside = rows < N - above
    W, KEEP, Q, ERROR, CODES = W + above * WIDTH, KEEP + above * WIDTH, Q + above * WIDTH, ERROR + above * WIDTH, CODES + above * (WIDTH // 16)
    column = tl.arange(0, 16)
    trial = tl.minimum(tl.arange(0, 16), 14)  # 15 of them; the last one twice
    g = tl.load(G)
    for first in range(0, WIDTH, 16):
        at = rows[None, :] * WIDTH + first + column[:, None]
        x = behind(W, U, ERROR, first, rows, inside, WIDTH)[:, :, None]
        kept = kept_of(KEEP, at, inside, KEPT)
        size = tl.abs(x)
        if KEPT:
            size = tl.where(kept != 0.0, size, 0.0)
        base = block_code(tl.div_rn(tl.max(size, 0), g * 6.0 + tl.zeros((ROWS, 1), tl.float32)))
        code = tl.where(base > 0, tl.minimum(tl.maximum(base + (trial - 7)[None, :], 1), 126), 0)
        scale = e4m3_to_f32(code) * g
        divisor = tl.where(scale > 0.0, scale, 1.0)
        rest = tl.broadcast_to(x, (16, ROWS, 16))
        q, error = tl.zeros((16, ROWS, 16), tl.float32), tl.zeros((16, ROWS, 16), tl.float32)
        cost = tl.zeros((ROWS, 16), tl.float32)
        for c in range(16):
            here = (column == c)[:, None, None]
            value = column_of(rest, here)
            rounded = to_scaled_grid(value, scale, divisor)
            if KEPT:
                rounded = tl.where(column_of(kept, here) != 0.0, rounded, 0.0)
            row = U + (first + c) * WIDTH + first
            off = (value - rounded) * inverse_of(tl.load(row + c))
            cost += off * off
            q, error = tl.where(here, rounded[None, :, :], q), tl.where(here, off[None, :, :], error)
            rest -= tl.load(row + column)[:, None, None] * off[None, :, :]
        cheapest = cost == tl.min(cost, 1)[:, None]
        best = tl.min(tl.where(cheapest, code, 126), 1)
        # Trials may have one code, and then everything in common: the first of them.
        order = tl.arange(0, 16)[None, :]
        chosen = (order == tl.min(tl.where(cheapest & (code == best[:, None]), order, 15), 1)[:, None])[None, :, :]
        tl.store(Q + at, of_trial(q, chosen), mask=inside[None, :])
        tl.store(ERROR + at, of_trial(error, chosen), mask=inside[None, :])
        tl.store(CODES + rows * (WIDTH // 16) + first // 16, best.to(tl.uint8), mask=inside)
        tl.debug_barrier()  # the next block reads other threads' errors


@triton.jit
def refine_panel(PULL, Q, CODES, H, G, KEEP, CHANGE, N, WIDTH, GAIN, PASSES: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr):
    """``formats.gptq.Panels.refined`` of ``WIDTH`` columns, a multiple of 16. KEPT: there is a KEEP."""
    above = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    inside = rows < N - above
    PULL, KEEP, Q, CHANGE, CODES = PULL + above * WIDTH, KEEP + above * WIDTH, Q + above * WIDTH, CHANGE + above * WIDTH, CODES + above * (WIDTH // 16)
    column = tl.arange(0, 16)
    order = tl.arange(0, 8)  # of 5 trials; the last one four times
    trial = tl.minimum(order, 4) - 2
    g = tl.load(G)
    for first in range(0, WIDTH, 16):
        at = rows[None, :] * WIDTH + first + column[:, None]
        pull = tl.broadcast_to(behind(PULL, H, CHANGE, first, rows, inside, WIDTH)[:, :, None], (16, ROWS, 8))
        now = tl.load(Q + at, mask=inside[None, :], other=0.0)
        before = tl.broadcast_to(now[:, :, None], (16, ROWS, 8))
        kept = kept_of(KEEP, at, inside, KEPT)
        present = tl.load(CODES + rows * (WIDTH // 16) + first // 16, mask=inside, other=1).to(tl.int32)
        code = present[:, None] + trial[None, :]
        valid = (code >= 1) & (code <= 126)
        scale = e4m3_to_f32(tl.where(valid, code, 1)) * g
        divisor = tl.where(scale > 0.0, scale, 1.0)
        change = tl.zeros((16, ROWS, 8), tl.float32)
        gain, size = tl.zeros((ROWS, 8), tl.float32), tl.zeros((ROWS, 8), tl.float32)
        for _ in range(PASSES):
            for c in range(16):
                here = (column == c)[:, None, None]
                row = H + (first + c) * WIDTH + first
                diagonal = tl.load(row + c)
                inverse = inverse_of(diagonal)
                changed, towards = column_of(change, here), column_of(pull, here)
                value = column_of(before, here) + changed
                step = to_scaled_grid(value + towards * inverse, scale, divisor) - value
                if KEPT:
                    step = tl.where(column_of(kept, here) != 0.0, step, 0.0)
                own = step * diagonal
                gain += step * (towards * 2.0 - own)
                size += step * own
                change = tl.where(here, (changed + step)[None, :, :], change)
                pull -= tl.load(row + column)[:, None, None] * step[None, :, :]
        gain = tl.where(valid, gain - size * GAIN, float("-inf"))
        most = tl.max(gain, 1)
        best = tl.min(tl.where(gain == most[:, None], code, 252), 1)
        better = most > 0.0
        chosen = ((order[None, :] == (best - present + 2)[:, None]) & better[:, None])[None, :, :]
        moved = of_trial(change, chosen)
        tl.store(Q + at, now + moved, mask=inside[None, :])
        tl.store(CHANGE + at, moved, mask=inside[None, :])
        tl.store(CODES + rows * (WIDTH // 16) + first // 16, tl.where(better, best, present).to(tl.uint8), mask=inside)
        tl.debug_barrier()  # the next block reads other threads' changes
