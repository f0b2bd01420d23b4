"""Attention of many new tokens over what a cache holds, causal from its counter: no mask is made, and no tile that the counter excludes is read.

A program takes BLOCK_M rows, those with the most keys first: queries of one head, or of the PER heads that share a KV head, a query's heads side by side.
Softmax is online, in base 2 and float32. Keys and values are rows of memory in the dtype of the query (:mod:`.append` writes them for a cache in 8 or 4
bits): with ABSOLUTE the token at the position p has row p, else row BACK + p - held, where ``held`` is how many tokens came before.

    loop      which keys                                                           what is compared
    ----------------------------------------------------------------------------------------------------------------------
    whole     rounded, and all queries of the tile attend to them                  nothing; with a window, where it begins
    edge      rounded, and some queries attend to them                             causality
    near      exact copies, of a format that has them                              causality, and where they begin

A query at the position q attends to rounded copies up to q - LAST and to exact ones above that (LAST 0: to rounded ones alone). Both are terms of one
softmax. The first tokens of a sequence, exact for all queries, are so among the rounded ones, too.

Unless WHOLE, SPLITS programs share the keys of a tile: few queries behind many tokens have too few tiles to fill a GPU. The keys of the three loops, one
after the other, are divided into parts of equal length, a multiple of BLOCK_N and at least LEAST, by the counter. A part writes maximum, sum and
unnormalised output of each row in float32; ``decode_attention_combine`` adds the parts up in the order of their keys.

Two runs of one call give the same bits, split or not: nothing depends on which program comes first. Besides, without a window the bits of a row do not
depend on the other rows of a call that is not split and has the same tile sizes, because its keys are added up BLOCK_N at a time from position 0 on. They do
if the call is split, which follows from the sizes of the call and from the GPU, or has a window, where the first key is that of the tile.

NaN in a value reaches all queries of a tile that visits it, as it does in a product over a mask. Padded and unwritten rows are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_step import unmasked, with_sink


@triton.jit
def load_tile(X, start, end, stride, n, CHECK: tl.constexpr, some, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[N, BLOCK_D]``: the rows ``start + n`` of X. CHECK: zeros from ``end`` on; MASKED: and where not ``some``."""
    d = tl.arange(0, BLOCK_D)
    row = tl.zeros((), tl.int64) + start  # the interpreter counts in Python's numbers
    at = X + row * stride + (n * stride)[:, None] + d[None, :]
    if CHECK or MASKED:
        ok = start + n < end
        if MASKED:
            ok = ok & some
        ok = ok[:, None]
        if D != BLOCK_D:
            ok = ok & (d < D)[None, :]
        return tl.load(at, mask=ok, other=0.0)
    elif D != BLOCK_D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def weights(s, used, m, total, scale, softcap, SOFTCAP: tl.constexpr, CHECK: tl.constexpr):
    """Scores -> (maximum, sum, what the output shrinks by, weights). CHECK: those that are not ``used`` are left out."""
    factor = scale
    if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); softcap is in base 2 as the scores are, and 2 log2(e) is 2.885..
        s = softcap - 2.0 * softcap / (1.0 + tl.exp2(s * (scale * 2.8853900817779268 / softcap)))
        factor = 1.0
    if CHECK:
        s = tl.where(used, s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1) * factor)
    reference = tl.where(higher == float("-inf"), 0.0, higher) if CHECK else higher  # -inf - -inf is NaN
    p = tl.exp2(s * factor - reference[:, None])
    shrink = tl.exp2(m - reference)
    return higher, total * shrink + tl.sum(p, 1), shrink, p


@triton.jit
def seen_by(at, query, end, MASK, LENGTH, stride_mp, upto, WINDOW: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LAST: tl.constexpr):
    """(``[M, N]``: does each query attend to each key, ``[N]``: is the key not masked). CAUSAL: up to ``query - upto``. LAST: of the last ones alone."""
    some = at < end
    if MASKED:
        some = unmasked(MASK, at, some, LENGTH, stride_mp)
    used = some[None, :]
    if CAUSAL:
        used = used & (at[None, :] <= query[:, None] - upto)
    if WINDOW > 0:
        used = used & (at[None, :] > query[:, None] - WINDOW)
    if LAST > 0:
        used = used & (at[None, :] > query[:, None] - LAST)
    return used, some


@triton.jit
def key_parts(count, SPLITS, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """(keys of a part, number of parts): at most SPLITS parts of ``count`` keys, each of a multiple of BLOCK_N and of at least LEAST."""
    each = tl.maximum(tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_N) * BLOCK_N, LEAST)
    return each, tl.cdiv(count, each)


@triton.jit(do_not_specialize=["SLOTS", "LENGTH", "HEADS", "QUERIES", "BACK", "NEAR_BACK", "SPLITS", "stride_mb"])
def prefill_attention(
    Q, K, V, NEAR_K, NEAR_V, POSITION, MASK, SINKS, OUT, PEAK, SUM, PARTIAL, SLOTS, LENGTH, HEADS, QUERIES, BACK, NEAR_BACK, SPLITS, stride_qb, stride_qh,
    stride_qq, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_nb, stride_nh, stride_ns, stride_wb, stride_wh, stride_ws, stride_mb,
    stride_mp, scale, softcap, GROUP: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr, ABSOLUTE: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr, WHOLE: tl.constexpr, LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One tile of rows, or a part of its keys. PER: 1, or GROUP. ``scale``: above 0, times log2(e). BLOCK_N keys a step. WHOLE: SPLITS is 1.

    NEAR_K (strides ``n``), NEAR_V (``w``): the exact copies. Beyond the end of a cache without a window the result is NaN.
    """
    tile = tl.program_id(0)
    part = 0
    if not WHOLE:
        part = tile % SPLITS
        tile = tile // SPLITS
    tiles = tl.cdiv(QUERIES * PER, BLOCK_M)
    of_all = tile // tiles
    first = (tiles - 1 - tile % tiles) * BLOCK_M
    b = (of_all // (HEADS // PER)).to(tl.int64)
    head = of_all % (HEADS // PER) * PER
    kv_head = (head // GROUP).to(tl.int64)
    m_at = first + tl.arange(0, BLOCK_M)
    number = m_at // PER  # of the query, among the new ones
    inside = number < QUERIES
    held = tl.load(POSITION).to(tl.int32)
    room = held >= 0
    if WINDOW == 0:
        room = room & (held + QUERIES <= SLOTS)
    held = tl.where(room, held, 0)

    K += b * stride_kb + kv_head * stride_kh
    V += b * stride_vb + kv_head * stride_vh
    if not ABSOLUTE:
        K += (BACK - held).to(tl.int64) * stride_ks
        V += (BACK - held).to(tl.int64) * stride_vs
    if MASKED:
        MASK += b * stride_mb
    d = tl.arange(0, BLOCK_D)
    ok = inside[:, None] & (d < D)[None, :]
    Q += b * stride_qb + head.to(tl.int64) * stride_qh
    from_row = number.to(tl.int64) * stride_qq
    if PER > 1:
        from_row += (m_at % PER).to(tl.int64) * stride_qh
    q = tl.load(Q + from_row[:, None] + d[None, :], mask=ok, other=0.0)
    query = held + number  # their positions
    lowest = held + first // PER
    end = tl.minimum(lowest + BLOCK_M if PER == 1 else held + (first + BLOCK_M - 1) // PER + 1, held + QUERIES)
    begin = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(held)
    # To positions below this one all queries of the tile attend, but for a window, and to rounded copies if there are two of each.
    upto = lowest - LAST + 1 if LAST > 0 else lowest + 1
    whole_end = begin + tl.maximum(upto - begin, 0) // BLOCK_N * BLOCK_N
    whole_begin = begin
    if not WHOLE:
        near_begin = tl.maximum(lowest - LAST + 1, begin)
        rounded = tl.cdiv(tl.maximum(end - LAST - begin, 0), BLOCK_N) * BLOCK_N
        count = rounded + (end - near_begin) if LAST > 0 else rounded
        each, parts = key_parts(count, SPLITS, LEAST, BLOCK_N)
        from_key = part * each
        whole_begin = begin + from_key
        edge_begin = tl.maximum(whole_end, whole_begin)
        whole_end = tl.minimum(whole_end, whole_begin + each)
        edge_end = tl.minimum(end - LAST, whole_begin + each)
        near_end = tl.minimum(end, near_begin + (from_key + each - rounded))
        near_begin += tl.maximum(from_key - rounded, 0)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    CHECK: tl.constexpr = MASKED or WINDOW > 0
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(whole_begin, whole_end, BLOCK_N, num_stages=STAGES):
        used, some = seen_by(start + n, query, end, MASK, LENGTH, stride_mp, 0, WINDOW, MASKED, False, 0)
        k = load_tile(K, start, end, stride_ks, n, False, some, False, D, BLOCK_D)
        m, total, shrink, p = weights(tl.dot(q, tl.trans(k)), used, m, total, scale, softcap, SOFTCAP, CHECK)
        v = load_tile(V, start, end, stride_vs, n, False, some, MASKED, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    for start in tl.range(whole_end if WHOLE else edge_begin, end - LAST if WHOLE else edge_end, BLOCK_N, num_stages=STAGES):
        used, some = seen_by(start + n, query, end, MASK, LENGTH, stride_mp, LAST, WINDOW, MASKED, True, 0)
        k = load_tile(K, start, end, stride_ks, n, True, some, False, D, BLOCK_D)
        m, total, shrink, p = weights(tl.dot(q, tl.trans(k)), used, m, total, scale, softcap, SOFTCAP, True)
        v = load_tile(V, start, end, stride_vs, n, True, some, MASKED, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    if LAST > 0:
        NEAR_K += b * stride_nb + kv_head * stride_nh + (NEAR_BACK - held).to(tl.int64) * stride_ns
        NEAR_V += b * stride_wb + kv_head * stride_wh + (NEAR_BACK - held).to(tl.int64) * stride_ws
        for start in tl.range(tl.maximum(lowest - LAST + 1, begin) if WHOLE else near_begin, end if WHOLE else near_end, BLOCK_N, num_stages=STAGES):
            used, some = seen_by(start + n, query, end, MASK, LENGTH, stride_mp, 0, WINDOW, MASKED, True, LAST)
            k = load_tile(NEAR_K, start, end, stride_ns, n, True, some, False, D, BLOCK_D)
            m, total, shrink, p = weights(tl.dot(q, tl.trans(k)), used, m, total, scale, softcap, SOFTCAP, True)
            v = load_tile(NEAR_V, start, end, stride_ws, n, True, some, MASKED, D, BLOCK_D)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])

    if PER > 1:
        head += m_at % PER
    to = (b * QUERIES + number.to(tl.int64)) * HEADS + head
    if WHOLE:
        total, shrink = with_sink(m, total, SINKS, tl.zeros_like(m_at) + head, inside, SINK)
        y = tl.where(room, acc * tl.where(total == 0.0, 0.0, shrink / total)[:, None], float("nan"))
        tl.store(OUT + (to * D)[:, None] + d[None, :], y.to(OUT.dtype.element_ty), mask=ok)
    else:
        if SINK:  # noqa: SIM102 (a constant: only the other is a branch)
            if part == 0:  # a term of the sum without a value
                sink = tl.load(SINKS + tl.zeros_like(m_at) + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
                higher = tl.maximum(m, sink)
                shrink = tl.exp2(m - higher)
                total = total * shrink + tl.exp2(sink - higher)
                acc = acc * shrink[:, None]
                m = higher
        to = to * SPLITS + part
        # Of a part without keys the sum alone, zero, is read. Without room in the cache the first part makes the row NaN.
        tl.store(SUM + to, tl.where(room | (part >= parts), total, 1.0), mask=inside)
        if part < parts:
            tl.store(PEAK + to, tl.where(room, m, 0.0), mask=inside)
            tl.store(PARTIAL + (to * D)[:, None] + d[None, :], tl.where(room, acc, float("nan")), mask=ok)
