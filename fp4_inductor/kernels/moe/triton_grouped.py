"""Tens to hundreds of tokens: grouped tensor-core products over pairs sorted by expert (:mod:`.triton_route`), weights decoded in registers.

The weight is the left operand, as in :mod:`..linear.triton_mid`: few tokens an expert waste no tensor-core rows. Rows of a tile are
independent, so the order of pairs within an expert changes no bit. A third launch sums each token's outputs in the order of its choices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_mid import decode_bytes, scale_of_bytes
from ..triton_common import decompressed
from .triton_decode import activation, local_expert


@triton.jit
def decoded(
    CODES, META, scales, rows, ok, k, K, DTYPE: tl.constexpr, SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """``[BLOCK_N, BLOCK_K]`` of one expert's ``rows`` (int64), times 2**-8, the global scale left out."""
    ks = k // 16 + tl.arange(0, BLOCK_K // 16)
    if SPARSE:
        kv = k // 4 + tl.arange(0, BLOCK_K // 4)
        km = k // 8 + tl.arange(0, BLOCK_K // 8)
        v = tl.load(CODES + rows[:, None] * (K // 4) + kv[None, :], mask=ok[:, None] & (kv < K // 4)[None, :], other=0)
        m = tl.load(META + rows[:, None] * (K // 8) + km[None, :], mask=ok[:, None] & (km < K // 8)[None, :], other=0)
        q = decompressed(v, m, BLOCK_N, BLOCK_K)
    else:
        kb = k // 2 + tl.arange(0, BLOCK_K // 2)
        q = tl.load(CODES + rows[:, None] * (K // 2) + kb[None, :], mask=ok[:, None] & (kb < K // 2)[None, :], other=0)
    s = tl.load(scales + rows[:, None] * (K // 16) + ks[None, :], mask=ok[:, None] & (ks < K // 16)[None, :], other=0)
    lo, hi = decode_bytes(q, scale_of_bytes(s, DTYPE, BLOCK_N, BLOCK_K, BF16, ASM), BF16, ASM)
    return tl.reshape(tl.join(lo, hi), (BLOCK_N, BLOCK_K))


@triton.jit
def moe_grouped_up(
    X, WEIGHTS, ORDER, ENDS, TILE_EXPERT, TILE_START, CODES, META, SCALE, GLOBAL_SCALE, BIAS, H, TOP_K, INNER, K, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    TWO: tl.constexpr = False
):  # fmt: skip
    """H[place in ORDER, i] = act(x[token] @ gate_up[expert].T + bias)"""
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    blocks = tl.cdiv(INNER, BLOCK_N)  # one grid axis: the others end at 65535
    slot = tl.program_id(0) // blocks
    e = tl.load(TILE_EXPERT + slot).to(tl.int64)
    if e >= 0:
        place = tl.load(TILE_START + slot) + tl.arange(0, BLOCK_M)
        live = place < tl.load(ENDS + e)
        pair = tl.load(ORDER + place, mask=live, other=0).to(tl.int64)
        source = (pair // TOP_K) * K
        ri = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        ok = ri < INNER
        outputs = 2 * INNER if GATED else INNER
        gate_rows = e * outputs + (2 * ri if INTERLEAVED else ri)
        up_rows = gate_rows + (1 if INTERLEAVED else INNER)
        a = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        b = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            kx = k + tl.arange(0, BLOCK_K)
            x = tl.trans(tl.load(X + source[:, None] + kx[None, :], mask=live[:, None] & (kx < K)[None, :], other=0.0))
            a = tl.dot(decoded(CODES, META, scales, gate_rows, ok, k, K, x.dtype, SPARSE, BLOCK_N, BLOCK_K, BF16, ASM), x, a)
            if GATED:
                b = tl.dot(decoded(CODES, META, scales, up_rows, ok, k, K, x.dtype, SPARSE, BLOCK_N, BLOCK_K, BF16, ASM), x, b)
        if TWO:
            gate = a * (tl.load(GLOBAL_SCALE + e * 2) * 256.0)
            up = b * (tl.load(GLOBAL_SCALE + e * 2 + 1) * 256.0)
        else:
            factor = tl.load(GLOBAL_SCALE + e) * 256.0
            gate = a * factor
            up = b * factor
        if ON_INPUT:
            w = tl.load(WEIGHTS + pair, mask=live, other=0.0).to(tl.float32)
            gate = gate * w[None, :]
            up = up * w[None, :]
        if HAS_BIAS:
            gate += tl.load(BIAS + gate_rows, mask=ok, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(BIAS + up_rows, mask=ok, other=0.0).to(tl.float32)[:, None]
        h = activation(gate, up, ALPHA, LIMIT, ACT, GATED)
        tl.store(H + place.to(tl.int64)[None, :] * INNER + ri[:, None], h.to(H.dtype.element_ty), mask=live[None, :] & ok[:, None])


@triton.jit
def moe_grouped_down(
    H, ORDER, ENDS, TILE_EXPERT, TILE_START, CODES, META, SCALE, GLOBAL_SCALE, BIAS, OUT, N, K, HAS_BIAS: tl.constexpr, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """OUT[pair, n] = h @ down[expert].T + bias"""
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    blocks = tl.cdiv(N, BLOCK_N)  # one grid axis: the others end at 65535
    slot = tl.program_id(0) // blocks
    e = tl.load(TILE_EXPERT + slot).to(tl.int64)
    if e >= 0:
        place = tl.load(TILE_START + slot) + tl.arange(0, BLOCK_M)
        live = place < tl.load(ENDS + e)
        pair = tl.load(ORDER + place, mask=live, other=0).to(tl.int64)
        rn = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        ok = rn < N
        rows = e * N + rn
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            kx = k + tl.arange(0, BLOCK_K)
            h = tl.load(H + place.to(tl.int64)[:, None] * K + kx[None, :], mask=live[:, None] & (kx < K)[None, :], other=0.0)
            acc = tl.dot(decoded(CODES, META, scales, rows, ok, k, K, h.dtype, SPARSE, BLOCK_N, BLOCK_K, BF16, ASM), tl.trans(h), acc)
        y = acc * (tl.load(GLOBAL_SCALE + e) * 256.0)
        if HAS_BIAS:
            y += tl.load(BIAS + rows, mask=ok, other=0.0).to(tl.float32)[:, None]
        tl.store(OUT + pair[None, :] * N + rn[:, None], y.to(OUT.dtype.element_ty), mask=live[None, :] & ok[:, None])


@triton.jit
def moe_combine(
    OUT,
    PLACE,
    IDS,
    WEIGHTS,
    MAP,
    BIAS,
    Y,
    E,
    MAP_SIZE,
    N,
    TOP_K: tl.constexpr,
    ON_INPUT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    SORTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Y[token, n] = sum over the token's experts of weight * (OUT[pair] + bias of the expert) (SORTED: OUT[PLACE[pair]])"""
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    rn = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_N,), tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        e = local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP)
        valid = e >= 0
        row = tl.load(PLACE + pair, mask=valid, other=0).to(tl.int64) if SORTED else pair
        z = tl.load(OUT + row * N + rn, mask=rn < tl.where(valid, N, 0), other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(BIAS + e * N + rn, mask=rn < tl.where(valid, N, 0), other=0.0).to(tl.float32)
        if not ON_INPUT:
            z = z * tl.load(WEIGHTS + pair, mask=valid, other=0.0).to(tl.float32)
        y += z
    tl.store(Y + token * N + rn, y.to(Y.dtype.element_ty), mask=rn < N)
