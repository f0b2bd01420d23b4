"""One decode step of ``fp4.cached_attention`` in one launch: norm and rotation of query and key, append, attention over the old tokens, combination.

A program owns the queries of one KV head, all rows of one tile as in :mod:`..decode_attention.triton_split`, and a part of the *old* positions: those before
the counter. Part 0 has the new tokens besides, whose keys and values it takes from the arguments, attends to, and writes to their slots.

No two programs touch one slot. Old positions are read by all, new ones written by part 0 and read by nobody. In a ring a new token takes the slot of the
token SLOTS before it; the launcher serves only Q <= SLOTS - WINDOW + 1 new tokens, so that these lie before the window of the first query:
position + Q - 1 - SLOTS <= position - WINDOW, and programs begin at position - WINDOW + 1.

How many parts there are is computed from the counter: at most SPLITS, each of a multiple of LEAST positions, so programs without positions end at once.
A part writes maximum, sum and unnormalised output to memory, then counts itself in ARRIVALS; the last one reads them all and writes the result.
``debug_barrier`` orders the writes of a program's threads before the one that counts; that is a release and an acquire on the GPU's scope, so the last
program sees what every other one wrote. It reads past the L1 cache (``.cg``), which is not coherent. Parts are summed by their number, whoever is last:
results are bit-equal from run to run. The last program sets the counter back to zero for the next launch, which begins to count when this one has ended.

PDL (programmatic dependent launch, sm_90 on): as in :mod:`..moe.triton_decode`. With EARLY the counter and the first tile of old positions are requested
before the wait. The launcher's caller vouches that the kernel before on the stream writes neither; the kernels before that one have ended when it lets this
one begin, because each waits for its predecessor first. A program that ends without waiting does no harm: part 0 waits, so the launch does not end earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepared(
    X, rows, inside, WEIGHT, COS, SIN, angles, eps, offset, NORM: tl.constexpr, ROTARY: tl.constexpr, ANGLES: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows of X ``[R, BLOCK_D]`` after norm and rotation, float32, then rounded once. ``rows``, ``angles``: where each row of X and of COS begins."""
    d = tl.arange(0, BLOCK_D)
    x = tl.load(X + rows[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if NORM or ROTARY > 0:
        y = x.to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
            y = y * factor * (offset + tl.load(WEIGHT + d, mask=d < D, other=0.0).to(tl.float32))[None, :]
        if ROTARY > 0:
            # The element that each is turned with: half of the rotated ones away. Loaded once more, it need not cross threads.
            HALF: tl.constexpr = ROTARY // 2
            other = (d + HALF) % ROTARY
            turns = inside[:, None] & (d < ROTARY)[None, :]
            z = tl.load(X + rows[:, None] + other[None, :], mask=turns, other=0.0).to(tl.float32)
            if NORM:
                z = z * factor * (offset + tl.load(WEIGHT + other).to(tl.float32))[None, :]
            at = angles[:, None] + (d % ANGLES)[None, :]
            cos = tl.load(COS + at, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(SIN + at, mask=turns, other=0.0).to(tl.float32)
            y = y * cos + tl.where((d < HALF)[None, :], -z, z) * sin
        x = y.to(X.dtype.element_ty)
    return x


@triton.jit
def add_tile(q, k, v, used, m, total, acc, scale, softcap, SOFTCAP: tl.constexpr):
    """Online softmax, base 2: (maximum, sum, output) after one more tile. ``used``: [R, S], what each row attends to. ``scale``: times log2(e)."""
    s = tl.dot(q, tl.trans(k)) * scale
    if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); softcap is in base 2 as the scores are
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / softcap)))
    s = tl.where(used, s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    p = tl.exp2(s - reference[:, None])
    shrink = tl.exp2(m - reference)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def unmasked(MASK, at, some, LENGTH, stride_mp):
    """``some``, but for the positions ``at`` that the mask leaves out."""
    return some & (tl.load(MASK + at.to(tl.int64) * stride_mp, mask=some & (at < LENGTH), other=0) != 0)


@triton.jit
def old_tile(
    K, V, MASK, at, slot, end, LENGTH, stride_ks, stride_vs, stride_mp, MASKED: tl.constexpr, RING: tl.constexpr, SLOTS, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """K and V of the positions ``at``, the first of which lies in ``slot``, and which are attended to; zeros where they are not: there may be NaN."""
    d = tl.arange(0, BLOCK_D)
    used = at < end
    if MASKED:
        used = unmasked(MASK, at, used, LENGTH, stride_mp)
    near = tl.arange(0, at.shape[0])
    if RING:
        near += slot
        near = tl.where(near >= SLOTS, near - SLOTS, near)
    else:
        K += slot.to(tl.int64) * stride_ks
        V += slot.to(tl.int64) * stride_vs
    near = near.to(tl.int64)
    ok = used[:, None] & (d < D)[None, :]
    k = tl.load(K + (near * stride_ks)[:, None] + d[None, :], mask=ok, other=0.0)
    v = tl.load(V + (near * stride_vs)[:, None] + d[None, :], mask=ok, other=0.0)
    return k, v, used


@triton.jit
def with_sink(m, total, SINKS, head, inside, HAS: tl.constexpr):
    """What the outputs are divided by, and the factor that brings them to its maximum: a sink has a share and no value."""
    if HAS:
        sink = tl.load(SINKS + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(m, sink)
        shrink = tl.exp2(m - higher)
        return total * shrink + tl.exp2(sink - higher), shrink
    else:
        return total, tl.where(total == 0.0, 0.0, 1.0)


@triton.jit
def combine(
    OUT, PEAK, SUM, PARTIAL, SINKS, base, parts, b, kv_head, HEADS, QUERIES, GROUP: tl.constexpr, SINK: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Write the rows of one KV head from their parts, whose results begin at row ``base``; BLOCK_P parts at a time."""
    ROWS = GROUP * QUERIES
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, BLOCK_P)
    row = g < ROWS
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    whole = tl.zeros((BLOCK_G,), tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for i in range(0, parts, BLOCK_P):
        has = ((i + p) < parts)[:, None] & row[None, :]
        at = base + (i + p)[:, None] * ROWS + g[None, :]
        peaks = tl.load(PEAK + at, mask=has, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(SUM + at, mask=has, other=0.0, cache_modifier=".cg")
        has = has[:, :, None] & (d < D)[None, None, :]
        outs = tl.load(PARTIAL + at[:, :, None] * D + d[None, None, :], mask=has, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - reference)
        weight = tl.exp2(peaks - reference[None, :])
        whole = whole * shrink + tl.sum(sums * weight, 0)
        out = out * shrink[:, None] + tl.sum(outs * weight[:, :, None], 0)
        peak = higher
    head_g = kv_head * GROUP + g % GROUP
    whole, shrink = with_sink(peak, whole, SINKS, head_g, row, SINK)
    y = out * tl.where(whole == 0.0, 0.0, shrink / whole)[:, None]
    to = (b * QUERIES + g // GROUP) * HEADS + head_g
    tl.store(OUT + to[:, None] * D + d[None, :], y.to(OUT.dtype.element_ty), mask=row[:, None] & (d < D)[None, :])


@triton.jit
def finish(
    OUT, PEAK, SUM, PARTIAL, ARRIVALS, SINKS, m, total, acc, room, part, parts, of_all, b, kv_head, HEADS, QUERIES, SPLITS, GROUP: tl.constexpr,
    SINK: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Write the rows of one KV head if this part is all of it; else what the part found, and, as the last of them, the rows. NaN where there was no room."""
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = r < GROUP * QUERIES
    ROWS = GROUP * QUERIES
    if parts == 1:
        head = kv_head * GROUP + r % GROUP
        total, shrink = with_sink(m, total, SINKS, head, inside, SINK)
        y = tl.where(room, acc * tl.where(total == 0.0, 0.0, shrink / total)[:, None], float("nan"))
        to = (b * QUERIES + r // GROUP) * HEADS + head
        tl.store(OUT + to[:, None] * D + d[None, :], y.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    elif not WHOLE:
        base = of_all.to(tl.int64) * SPLITS * ROWS
        to = base + part * ROWS + r
        tl.store(PEAK + to, m, mask=inside)
        tl.store(SUM + to, total, mask=inside)
        tl.store(PARTIAL + to[:, None] * D + d[None, :], acc, mask=inside[:, None] & (d < D)[None, :])
        tl.debug_barrier()
        arrived = tl.atomic_add(ARRIVALS + of_all, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            combine(
                OUT, PEAK, SUM, PARTIAL, SINKS, base, parts, b, kv_head, HEADS, QUERIES, GROUP, SINK, D, BLOCK_G, BLOCK_P, BLOCK_D
            )  # fmt: skip
            tl.store(ARRIVALS + of_all, 0)


@triton.jit
def place(POSITION, SLOTS, HEADS, QUERIES, SPLITS, GROUP: tl.constexpr, RING: tl.constexpr):
    """(part, number among all KV heads of all sequences, sequence, KV head, tokens in the cache, is there room for the new ones?) of this program.

    Beyond its end a cache is not written; the result is NaN then.
    """
    of_all = tl.program_id(0) // SPLITS
    kv_heads = HEADS // GROUP
    position = tl.load(POSITION).to(tl.int32)
    room = position >= 0
    if not RING:
        room = room & (position + QUERIES <= SLOTS)
    return tl.program_id(0) % SPLITS, of_all, (of_all // kv_heads).to(tl.int64), of_all % kv_heads, tl.where(room, position, 0), room


@triton.jit
def parts_of(count, SPLITS, LEAST: tl.constexpr):
    """(positions of each part, number of parts) of ``count`` positions: at most SPLITS parts, and at least one."""
    each = ((count + SPLITS - 1) // SPLITS + LEAST - 1) // LEAST * LEAST
    return each, tl.maximum((count + each - 1) // tl.maximum(each, 1), 1)


@triton.jit(do_not_specialize=["SLOTS", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb"])
def cached_attention_step(
    Q, KEY, VALUE, K, V, POSITION, MASK, SINKS, Q_NORM, K_NORM, COS, SIN, OUT, PEAK, SUM, PARTIAL, ARRIVALS, SLOTS, LENGTH, HEADS, QUERIES, SPLITS,
    stride_qb, stride_qh, stride_qq, stride_nb, stride_nh, stride_nq, stride_wb, stride_wh, stride_wq, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh,
    stride_vs, stride_mb, stride_mp, stride_cb, stride_cq, scale, softcap, eps, offset, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, ROTARY: tl.constexpr, ANGLES: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One part of at most SPLITS for one (sequence, KV head). WHOLE: SPLITS is 1. WINDOW 0: none, and SLOTS is the length of the cache.

    KEY, VALUE (strides ``n``, ``w``) hold the new tokens; K, V the cache. MASK: a byte for each position up to LENGTH, those of a sequence ``stride_mb`` apart.
    """
    RING: tl.constexpr = WINDOW > 0
    if PDL and not EARLY:  # what came before is complete for both kernels once this one goes on
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part, of_all, b, kv_head, held, room = place(POSITION, SLOTS, HEADS, QUERIES, SPLITS, GROUP, RING)
    first = tl.maximum(held - WINDOW + 1, 0) if RING else tl.zeros_like(held)
    each, parts = parts_of(held - first, SPLITS, LEAST)
    if part >= parts:
        return
    begin = first + part * each
    end = tl.minimum(begin + each, held)

    K += b * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += b * stride_vb + kv_head.to(tl.int64) * stride_vh
    if MASKED:
        MASK += b * stride_mb
    offset_s = tl.arange(0, BLOCK_S)
    slot = begin % SLOTS if RING else begin
    if EARLY:
        early_k, early_v, early_used = old_tile(
            K, V, MASK, begin + offset_s, slot, end, LENGTH, stride_ks, stride_vs, stride_mp, MASKED, RING, SLOTS, D, BLOCK_D
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    r = tl.arange(0, BLOCK_R)
    inside = r < GROUP * QUERIES
    head = kv_head * GROUP + r % GROUP
    query = r // GROUP
    d = tl.arange(0, BLOCK_D)
    q = prepared(
        Q + b * stride_qb, head.to(tl.int64) * stride_qh + query * stride_qq, inside, Q_NORM, COS, SIN, b * stride_cb + query * stride_cq, eps, offset,
        NORM_Q, ROTARY, ANGLES, D, BLOCK_D,
    )  # fmt: skip
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)

    if part == 0:  # the new tokens
        n = tl.arange(0, 16)
        there = n < QUERIES
        near = n.to(tl.int64)
        key = prepared(
            KEY + b * stride_nb + kv_head.to(tl.int64) * stride_nh, near * stride_nq, there, K_NORM, COS, SIN, b * stride_cb + near * stride_cq, eps, offset,
            NORM_K, ROTARY, ANGLES, D, BLOCK_D,
        )  # fmt: skip
        ok = there[:, None] & (d < D)[None, :]
        value = tl.load(VALUE + b * stride_wb + kv_head.to(tl.int64) * stride_wh + (near * stride_wq)[:, None] + d[None, :], mask=ok, other=0.0)
        to = (held + n) % SLOTS if RING else held + n
        to = to.to(tl.int64)
        ok = (n < tl.where(room, QUERIES, 0))[:, None] & (d < D)[None, :]
        tl.store(K + (to * stride_ks)[:, None] + d[None, :], key, mask=ok)
        tl.store(V + (to * stride_vs)[:, None] + d[None, :], value, mask=ok)
        seen = there
        if MASKED:
            seen = unmasked(MASK, held + n, there, LENGTH, stride_mp)
            value = tl.where(seen[:, None], value, 0.0)
        used = seen[None, :] & (n[None, :] <= query[:, None])
        if RING:
            used = used & (n[None, :] > query[:, None] - WINDOW)
        m, total, acc = add_tile(q, key, value, used, m, total, acc, scale, softcap, SOFTCAP)

    if EARLY:
        used = tl.broadcast_to(early_used[None, :], (BLOCK_R, BLOCK_S))
        if RING:
            used = used & ((begin + offset_s)[None, :] > (held + query)[:, None] - WINDOW)
        m, total, acc = add_tile(q, early_k, early_v, used, m, total, acc, scale, softcap, SOFTCAP)
    for start in range(BLOCK_S if EARLY else 0, end - begin, BLOCK_S):
        at = begin + start + offset_s
        slot = (begin + start) % SLOTS if RING else begin + start
        k, v, some = old_tile(K, V, MASK, at, slot, end, LENGTH, stride_ks, stride_vs, stride_mp, MASKED, RING, SLOTS, D, BLOCK_D)
        used = tl.broadcast_to(some[None, :], (BLOCK_R, BLOCK_S))
        if RING:
            used = used & (at[None, :] > (held + query)[:, None] - WINDOW)
        m, total, acc = add_tile(q, k, v, used, m, total, acc, scale, softcap, SOFTCAP)

    finish(
        OUT, PEAK, SUM, PARTIAL, ARRIVALS, SINKS, m, total, acc, room, part, parts, of_all, b, kv_head, HEADS, QUERIES, SPLITS, GROUP, SINK, D, BLOCK_R, BLOCK_D,
        BLOCK_G, BLOCK_P, WHOLE,
    )  # fmt: skip
