"""A few tokens: two launches, no sorting, no atomics. One program owns BLOCK_N outputs of one (token, expert) pair.

First the gate and up products and the activation (``h`` in float32, tokens * k rows), then the down products, weighted and summed over a
token's experts in one program, in the order of its choices. A pair whose id is no expert loads nothing and adds nothing.

The dot product is :mod:`..linear.triton_gemv`'s, of 2:4-sparse experts :mod:`..sparse_linear.triton_gemv`'s: a word of 8 codes is 8 k of a
row there and 16 k here, one scale block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_gemv import decode8, dot8, load_activations
from ..sparse_linear.triton_gemv import kept_dot, load_blocks
from ..triton_common import e4m3_to_f32


@triton.jit
def local_expert(IDS, MAP, at, MAP_SIZE, E, HAS_MAP: tl.constexpr):
    """The local expert of pair ``at``, or -1: see ``ops.moe.local_ids``."""
    e = tl.load(IDS + at).to(tl.int64)
    if HAS_MAP:
        known = (e >= 0) & (e < MAP_SIZE)
        e = tl.load(MAP + e, mask=known, other=-1).to(tl.int64)
    return tl.where((e >= 0) & (e < E), e, -1)


@triton.jit
def activation(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr):
    """float32 ``act(gate) * up`` as ``ops.activation.Activation``; NaN passes through the clamps as in torch. LIMIT 0: none."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ACT == "gelu":
        h = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        h = gate / (1.0 + tl.exp(-u))
    elif ACT == "relu":
        h = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu2":
        h = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = h * h
    else:
        h = gate / (1.0 + tl.exp(-ALPHA * gate))
    if GATED:
        h = h * (up + 1.0) if ACT == "swiglu_oai" else h * up
    return h


@triton.jit
def chunk_of(X, row, M, k, W, BLOCK_W: tl.constexpr, SPARSE: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """Activations from word ``k`` of a weight row on, as :func:`packed_dot` takes them; W words a row."""
    if SPARSE:
        return load_blocks(X, row, M, k * 16, W * 16, BLOCK_W, False, CVT, ASM)
    else:
        return load_activations(X, row, M, k * 8, W * 8, BLOCK_W, False, CVT, ASM)


@triton.jit
def packed_dot(
    words, metas, scales, rows, ok, k, W, chunk, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, SPARSE: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """float32, one number per scale block: ``rows`` of one expert (int64, W words each) from word ``k`` on against a chunk of activations."""
    kw = k + tl.arange(0, BLOCK_W)
    inside = ok[:, None] & (kw < W)[None, :]
    w = tl.load(words + rows[:, None] * W + kw[None, :], mask=inside, other=0, eviction_policy="evict_first")
    if SPARSE:
        m = tl.load(metas + rows[:, None] * W + kw[None, :], mask=inside, other=0, eviction_policy="evict_first")
        s = tl.load(scales + rows[:, None] * W + kw[None, :], mask=inside, other=0, eviction_policy="evict_first")
        a0, a1, a2, a3, b0, b1, b2, b3, undo = chunk
        return kept_dot(w, m, s, a0, a1, a2, a3, b0, b1, b2, b3, undo, BLOCK_N, BLOCK_W, CVT, ASM)
    else:
        ks = k // 2 + tl.arange(0, BLOCK_W // 2)
        s = tl.load(scales + rows[:, None] * (W // 2) + ks[None, :], mask=ok[:, None] & (ks < W // 2)[None, :], other=0, eviction_policy="evict_first")
        x0, x1, x2, x3, undo = chunk
        h0, h1, h2, h3 = decode8(w, CVT)
        zero = tl.zeros((BLOCK_N, BLOCK_W), tl.int32)
        p = dot8(h0, h1, h2, h3, x0[None, :] + zero, x1[None, :] + zero, x2[None, :] + zero, x3[None, :] + zero, ASM)
        return tl.sum(tl.reshape(p, (BLOCK_N, BLOCK_W // 2, 2)), 2) * (e4m3_to_f32(s) * undo[None, :])


@triton.jit
def moe_decode_up(
    X, IDS, WEIGHTS, MAP, CODES, META, SCALE, GLOBAL_SCALE, BIAS, H, TOP_K, T, E, MAP_SIZE, INNER, UNITS, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, UNIT: tl.constexpr, ONE_STEP: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """H[pair, i] = act(x[token] @ gate_up[expert].T + bias)"""
    words = CODES.to(tl.pointer_type(tl.int32), bitcast=True)
    metas = META.to(tl.pointer_type(tl.int16), bitcast=True) if SPARSE else words  # one 16-bit word for each word of kept codes
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    W = UNITS * UNIT  # a known power of two divides the words of a row: wide loads
    blocks = tl.cdiv(INNER, BLOCK_N)  # one grid axis: the others end at 65535
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    e = local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP)
    if e >= 0:
        ri = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        ok = ri < INNER
        outputs = 2 * INNER if GATED else INNER
        gate_rows = e * outputs + (2 * ri if INTERLEAVED else ri)
        up_rows = gate_rows + (1 if INTERLEAVED else INNER)
        token = pair // TOP_K
        a = tl.zeros((BLOCK_N, BLOCK_W if SPARSE else BLOCK_W // 2), tl.float32)
        b = tl.zeros((BLOCK_N, BLOCK_W if SPARSE else BLOCK_W // 2), tl.float32)
        for k in range(0, BLOCK_W if ONE_STEP else W, BLOCK_W):
            x = chunk_of(X, token, T, k, W, BLOCK_W, SPARSE, CVT, ASM)
            a += packed_dot(words, metas, scales, gate_rows, ok, k, W, x, BLOCK_N, BLOCK_W, SPARSE, CVT, ASM)
            if GATED:
                b += packed_dot(words, metas, scales, up_rows, ok, k, W, x, BLOCK_N, BLOCK_W, SPARSE, CVT, ASM)
        factor = tl.load(GLOBAL_SCALE + e)
        if ON_INPUT:
            factor = factor * tl.load(WEIGHTS + pair).to(tl.float32)
        gate = tl.sum(a, 1) * factor
        up = tl.sum(b, 1) * factor
        if HAS_BIAS:
            gate += tl.load(BIAS + gate_rows, mask=ok, other=0.0).to(tl.float32)
            if GATED:
                up += tl.load(BIAS + up_rows, mask=ok, other=0.0).to(tl.float32)
        tl.store(H + pair * INNER + ri, activation(gate, up, ALPHA, LIMIT, ACT, GATED), mask=ok)


@triton.jit
def weighted_down(
    H, IDS, WEIGHTS, MAP, words, metas, scales, GLOBAL_SCALE, BIAS, pair, rn, T, E, MAP_SIZE, N, W, TOP_K: tl.constexpr, ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ONE_STEP: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """float32 ``[BLOCK_N]``: one pair's share of its token's result, zeros if its id is no expert."""
    e = local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP)
    valid = e >= 0
    # Predicated loads instead of a branch: those of several experts are in flight together.
    ok = rn < tl.where(valid, N, 0)
    rows = tl.where(valid, e, 0) * N + rn
    source = tl.where(valid, pair, T * TOP_K)  # a row beyond the last counts as zero: what lies in an unwritten row is not read
    acc = tl.zeros((BLOCK_N, BLOCK_W if SPARSE else BLOCK_W // 2), tl.float32)
    for k in range(0, BLOCK_W if ONE_STEP else W, BLOCK_W):
        h = chunk_of(H, source, T * TOP_K, k, W, BLOCK_W, SPARSE, CVT, ASM)
        acc += packed_dot(words, metas, scales, rows, ok, k, W, h, BLOCK_N, BLOCK_W, SPARSE, CVT, ASM)
    z = tl.sum(acc, 1) * tl.load(GLOBAL_SCALE + e, mask=valid, other=0.0)
    if HAS_BIAS:
        z += tl.load(BIAS + rows, mask=ok, other=0.0).to(tl.float32)
    if not ON_INPUT:
        z = z * tl.load(WEIGHTS + pair, mask=valid, other=0.0).to(tl.float32)
    return z


@triton.jit
def moe_decode_down(
    H, IDS, WEIGHTS, MAP, CODES, META, SCALE, GLOBAL_SCALE, BIAS, Y, T, E, MAP_SIZE, N, UNITS, TOP_K: tl.constexpr, ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, UNIT: tl.constexpr, ONE_STEP: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Y[token, n] = sum over the token's experts of weight * (h @ down[expert].T + bias)"""
    words = CODES.to(tl.pointer_type(tl.int32), bitcast=True)
    metas = META.to(tl.pointer_type(tl.int16), bitcast=True) if SPARSE else words  # one 16-bit word for each word of kept codes
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    W = UNITS * UNIT
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    rn = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_N,), tl.float32)
    if ONE_STEP and TOP_K <= 16:  # unrolled, so that the loads of one expert need not wait for the sums of the one before
        for j in tl.static_range(TOP_K):
            y += weighted_down(
                H, IDS, WEIGHTS, MAP, words, metas, scales, GLOBAL_SCALE, BIAS, token * TOP_K + j, rn, T, E, MAP_SIZE, N, W,
                TOP_K, ON_INPUT, HAS_MAP, HAS_BIAS, SPARSE, BLOCK_N, BLOCK_W, ONE_STEP, CVT, ASM,
            )  # fmt: skip
    else:
        for j in range(TOP_K):
            y += weighted_down(
                H, IDS, WEIGHTS, MAP, words, metas, scales, GLOBAL_SCALE, BIAS, token * TOP_K + j, rn, T, E, MAP_SIZE, N, W,
                TOP_K, ON_INPUT, HAS_MAP, HAS_BIAS, SPARSE, BLOCK_N, BLOCK_W, ONE_STEP, CVT, ASM,
            )  # fmt: skip
    tl.store(Y + token * N + rn, y.to(Y.dtype.element_ty), mask=rn < N)
