"""Many tokens: what stands before and between two grouped products (behind them: :func:`.triton_grouped.moe_combine`), and the one in FP8.

Rows are pairs sorted by expert (:mod:`.triton_route`). For FP8 products every row is rounded to E4M3 with a scale of its own, as
``fp4.quantize_rows_fp8`` does, but for a product with the scale's reciprocal; the router's weight on the input only changes the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize_rows_fp8.triton_rows import larger, limited, scale_of, scale_of_row
from .triton_decode import activation, local_expert


@triton.jit
def scatter(
    x, IDS, WEIGHTS, MAP, PLACE, OUT, token, at, TOP_K, E, MAP_SIZE, K, E4M3_MAX, inverse, ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """``x``: columns ``at`` of one token, to the rows of its pairs."""
    if FP8:
        x = limited(x.to(tl.float32) * inverse, E4M3_MAX).to(OUT.dtype.element_ty)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        valid = local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP) >= 0
        place = tl.load(PLACE + pair, mask=valid, other=0).to(tl.int64)
        y = x
        if ON_INPUT and not FP8:
            y = (x.to(tl.float32) * tl.load(WEIGHTS + pair, mask=valid, other=0.0).to(tl.float32)).to(OUT.dtype.element_ty)
        tl.store(OUT + place * K + at, y, mask=at < tl.where(valid, K, 0))


@triton.jit
def moe_many_in(
    X, IDS, WEIGHTS, MAP, PLACE, OUT, ROW_SCALE, TOP_K, E, MAP_SIZE, K, E4M3_MAX, ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, FP8: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT[PLACE[pair]] = x[token], for every pair whose id is an expert. One program a token: it is rounded once. ONE_STEP: BLOCK >= K."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inverse = 1.0
    if ONE_STEP:
        x = tl.load(X + token * K + at, mask=at < K, other=0.0)
    if FP8:
        scale = scale_of(tl.max(tl.abs(x.to(tl.float32)), 0), E4M3_MAX) if ONE_STEP else scale_of_row(X, token, K, E4M3_MAX, BLOCK)
        inverse = 1.0 / scale
        for j in range(TOP_K):
            pair = token * TOP_K + j
            if local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP) >= 0:
                w = tl.load(WEIGHTS + pair).to(tl.float32) if ON_INPUT else 1.0
                tl.store(ROW_SCALE + tl.load(PLACE + pair), scale * w)
    if ONE_STEP:
        scatter(x, IDS, WEIGHTS, MAP, PLACE, OUT, token, at, TOP_K, E, MAP_SIZE, K, E4M3_MAX, inverse, ON_INPUT, HAS_MAP, FP8)
    else:
        for k in range(0, K, BLOCK):
            x = tl.load(X + token * K + k + at, mask=k + at < K, other=0.0)
            scatter(x, IDS, WEIGHTS, MAP, PLACE, OUT, token, k + at, TOP_K, E, MAP_SIZE, K, E4M3_MAX, inverse, ON_INPUT, HAS_MAP, FP8)


@triton.jit
def load_halves(P, row, i, INNER, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """float32 gate and up (zeros without) of outputs ``i .. i + BLOCK`` of a row of the first product, or of its bias."""
    at = i + tl.arange(0, BLOCK)
    if not GATED:
        gate = tl.load(P + row * INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
        up = gate * 0.0
    elif INTERLEAVED:
        both = 2 * i + tl.arange(0, 2 * BLOCK)
        z = tl.load(P + row * (2 * INNER) + both, mask=both < 2 * INNER, other=0.0)
        gate, up = tl.split(tl.reshape(z, (BLOCK, 2)))
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
    else:
        gate = tl.load(P + row * (2 * INNER) + at, mask=at < INNER, other=0.0).to(tl.float32)
        up = tl.load(P + row * (2 * INNER) + INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def activated(
    Z, BIAS, row, e, i, INNER, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """float32 act(Z[row] + bias of expert e), outputs ``i .. i + BLOCK``, zeros past INNER."""
    gate, up = load_halves(Z, row, i, INNER, GATED, INTERLEAVED, BLOCK)
    if HAS_BIAS:
        gate_bias, up_bias = load_halves(BIAS, e, i, INNER, GATED, INTERLEAVED, BLOCK)
        gate += gate_bias
        up += up_bias
    return activation(gate, up, ALPHA, LIMIT, ACT, GATED)


@triton.jit
def moe_many_between(
    Z, ORDER, ENDS, IDS, MAP, BIAS, H, ROW_SCALE, E, MAP_SIZE, INNER, E4M3_MAX, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, FP8: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """H[row] = act(Z[row] + bias of its expert); rows behind the last expert's are left alone. ONE_STEP: BLOCK >= INNER."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ENDS + E - 1):
        e = row * 0
        if HAS_BIAS:
            e = local_expert(IDS, MAP, tl.load(ORDER + row).to(tl.int64), MAP_SIZE, E, HAS_MAP)
        if ONE_STEP:
            at = tl.arange(0, BLOCK)
            h = activated(Z, BIAS, row, e, 0, INNER, ALPHA, LIMIT, ACT, GATED, INTERLEAVED, HAS_BIAS, BLOCK)
            if FP8:
                scale = scale_of(tl.max(tl.abs(h), 0), E4M3_MAX)
                tl.store(ROW_SCALE + row, scale)
                h = limited(h * (1.0 / scale), E4M3_MAX)
            tl.store(H + row * INNER + at, h.to(H.dtype.element_ty), mask=at < INNER)
        else:
            scale = 1.0
            if FP8:
                peak = tl.zeros((BLOCK,), tl.float32)
                for i in range(0, INNER, BLOCK):
                    peak = larger(peak, activated(Z, BIAS, row, e, i, INNER, ALPHA, LIMIT, ACT, GATED, INTERLEAVED, HAS_BIAS, BLOCK))
                scale = scale_of(tl.max(peak, 0), E4M3_MAX)
                tl.store(ROW_SCALE + row, scale)
            for i in range(0, INNER, BLOCK):
                at = i + tl.arange(0, BLOCK)
                h = activated(Z, BIAS, row, e, i, INNER, ALPHA, LIMIT, ACT, GATED, INTERLEAVED, HAS_BIAS, BLOCK)
                if FP8:
                    h = limited(h * (1.0 / scale), E4M3_MAX)
                tl.store(H + row * INNER + at, h.to(H.dtype.element_ty), mask=at < INNER)


@triton.jit
def moe_many_product(
    ROWS, ROW_SCALE, ENDS, TILE_EXPERT, TILE_START, WEIGHT, GLOBAL_SCALE, OUT, N, K, SLOTS, INVERSE_FACTOR, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EXACT: tl.constexpr, OF_ROWS: tl.constexpr = False
):  # fmt: skip
    """OUT[row, n] = ROWS[row] . WEIGHT[expert of the row, n] * ROW_SCALE[row] * GLOBAL_SCALE[expert] * INVERSE_FACTOR

    ROWS and WEIGHT: tensor descriptors ``[P, K]`` and ``[E * N, K]`` of E4M3 by tiles. A tile's rows of the next expert, its outputs past N and
    what lies past K are multiplied as they come (past the ends: zeros) and not stored. EXACT: the most k that the tensor cores sum up in their
    own, shorter, accumulators. OF_ROWS: GLOBAL_SCALE is of outputs, ``[E, N]``.
    """
    blocks = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * blocks) * GROUP  # GROUP slots take turns at one block of outputs: its weights are read from L2
    some = tl.minimum(SLOTS - first, GROUP)
    slot = first + tl.program_id(0) % (GROUP * blocks) % some
    e = tl.load(TILE_EXPERT + slot)
    if e >= 0:
        n = tl.program_id(0) % (GROUP * blocks) // some * BLOCK_N
        start = tl.load(TILE_START + slot)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(ROWS.load([start, k]), WEIGHT.load([e * N + n, k]).T, acc, max_num_imprecise_acc=EXACT)
        rows = start + tl.arange(0, BLOCK_M)
        live = rows < tl.load(ENDS + e)
        rn = n + tl.arange(0, BLOCK_N)
        row_scale = tl.load(ROW_SCALE + rows, mask=live, other=0.0)
        if OF_ROWS:
            scale = row_scale[:, None] * (tl.load(GLOBAL_SCALE + e.to(tl.int64) * N + rn, mask=rn < N, other=0.0) * INVERSE_FACTOR)[None, :]
        else:
            scale = (row_scale * (tl.load(GLOBAL_SCALE + e) * INVERSE_FACTOR))[:, None]
        tl.store(OUT + rows.to(tl.int64)[:, None] * N + rn[None, :], (acc * scale).to(OUT.dtype.element_ty), mask=live[:, None] & (rn < N)[None, :])
