"""A few queries over a cache (flash-decoding): a program owns the queries of one KV head and a part of the positions.

All query heads of a KV head are rows of one tile, so that K and V are read once; the rows are padded to 16, the
least that tensor cores take. Softmax online, in float32, base 2. With one part the program writes the result, else
its maximum, sum and unnormalised output, which a second kernel combines.

A cache is as long as it may get, and a mask says how far it is filled. Each program reads the mask first (a byte a
position, where K and V have 256 of them and more) and looks for the first and the last position that one of its rows
attends to. Only what lies between them is divided among the programs, read and computed. Inside, a position that no row
attends to is not loaded either: zeros take its place, so what lies there cannot leak as 0 * NaN. Where attention is causal and a counter on the device
says how far the cache is filled (``fp4.cached_attention``), the counter is read in the place of a mask.

Keys and values in codes of 8 bits (K_KIND, V_KIND) are multiplied as in :mod:`..cached_attention.triton_quantized`: products are of float16, in which codes
are exact, the query is scaled by a power of two for each row, and the scale of a token is multiplied into its score and into its weight.

PDL (programmatic dependent launch, sm_90 on): as in :mod:`..moe.triton_decode`. Source: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cached_attention.triton_quantized import e4m3_to_f16, int8_to_f16, query_numbers

DENSE = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def numbers(code, KIND: tl.constexpr):
    """Bytes of codes -> float16: of INT8 the value, of FP8 the value * 2**-8; both exact. Others are what they are."""
    if KIND == INT8:
        return int8_to_f16(code)
    elif KIND == FP8:
        return tl.where((code & 0x7F) == 0x7F, float("nan"), e4m3_to_f16(code))
    else:
        return code


@triton.jit
def token_scale(SCALE, at, used, stride, KIND: tl.constexpr):
    """What :func:`numbers` of the tokens ``at`` are multiplied by, float32; zero where they are not ``used``."""
    scale = tl.load(SCALE + at * stride, mask=used, other=0.0).to(tl.float32)
    if KIND == FP8:
        scale = scale * 256.0
    return scale


@triton.jit
def mask_tile(MASK, inside, row, at, LENGTH, stride_s, MASK_KIND: tl.constexpr, PER_ROW: tl.constexpr):
    """What is added to the scores (base 2) at positions ``at``, -inf for "do not attend", float32: [R, S], or [1, S] where all rows have one mask."""
    at_mask = at.to(tl.int64) * stride_s
    if PER_ROW:
        where = row[:, None] + at_mask[None, :]
        ok = inside[:, None] & (at < LENGTH)[None, :]
    else:
        where = at_mask[None, :]
        ok = (at < LENGTH)[None, :]
    if MASK_KIND == 1:
        return tl.where(tl.load(MASK + where, mask=ok, other=0) != 0, 0.0, float("-inf"))
    else:
        # The least number of a dtype stands for "hardly": it must not become -inf by the factor.
        added = tl.load(MASK + where, mask=ok, other=float("-inf")).to(tl.float32)
        return tl.where(added > float("-inf"), tl.maximum(added * 1.4426950408889634, -3.0e38), added)


@triton.jit
def attended(MASK, inside, row, begin, end, stride_s, SCAN: tl.constexpr, MASK_KIND: tl.constexpr, PER_ROW: tl.constexpr):
    """Of the positions ``begin .. end`` the first that a row attends to, and the last plus one (0 if there is none)."""
    offset = tl.arange(0, SCAN)
    first = tl.full((SCAN,), 2147483647, tl.int32)
    last = tl.full((SCAN,), 0, tl.int32)
    for start in tl.range(begin, end, SCAN, num_stages=1):
        at = start + offset
        seen = tl.max(mask_tile(MASK, inside, row, at, end, stride_s, MASK_KIND, PER_ROW), 0) > float("-inf")
        first = tl.minimum(first, tl.where(seen, at, 2147483647))
        last = tl.maximum(last, tl.where(seen, at + 1, 0))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit
def attend(
    q, K, V, K_SCALE, V_SCALE, MASK, inside, row, begin, end, stride_ks, stride_vs, stride_xs, stride_ys, stride_s, scale, MASK_KIND: tl.constexpr,
    PER_ROW: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """(maximum [R], sum [R], output [R, D] not yet divided by the sum) over the positions ``begin .. end``. ``scale``: times log2(e).

    ``row``: where the mask of each row begins; with MASK_KIND 3 the last position that each row attends to.
    """
    offset = tl.arange(0, BLOCK_S)
    near = offset.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if K_KIND != DENSE:
        q, factor = query_numbers(q, scale)
    # From 0 on: of addresses that begin at a position found by a reduction, Triton does not know that they are multiples of 16 bytes.
    K += begin.to(tl.int64) * stride_ks
    V += begin.to(tl.int64) * stride_vs
    for start in range(0, end - begin, BLOCK_S):
        at = begin + start + offset
        used = at < end
        if MASK_KIND == 1 or MASK_KIND == 2:
            added = mask_tile(MASK, inside, row, at, end, stride_s, MASK_KIND, PER_ROW)
            used = used & (tl.max(added, 0) > float("-inf"))
        far = tl.cast(start, tl.int64)
        ok = used[:, None] & (d < D)[None, :]
        k = tl.load(K + far * stride_ks + (near * stride_ks)[:, None] + d[None, :], mask=ok, other=0)
        v = tl.load(V + far * stride_vs + (near * stride_vs)[:, None] + d[None, :], mask=ok, other=0)
        s = tl.dot(q, tl.trans(numbers(k, K_KIND)))
        if K_KIND != DENSE:
            s = s * factor[:, None] * token_scale(K_SCALE, at.to(tl.int64), used, stride_xs, K_KIND)[None, :]
        else:
            s = s * scale
        if MASK_KIND == 0:
            s = tl.where(used[None, :], s, float("-inf"))
        elif MASK_KIND == 3:
            s = tl.where(used[None, :] & (at[None, :] <= row[:, None]), s, float("-inf"))
        else:
            s = tl.where(added > float("-inf"), s + added, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        p = tl.exp2(s - reference[:, None])
        shrink = tl.exp2(m - reference)
        total = total * shrink + tl.sum(p, 1)
        if V_KIND != DENSE:
            # Divided by the largest scale of the tile, so that float16 holds the weights however large the values are.
            of_token = token_scale(V_SCALE, at.to(tl.int64), used, stride_ys, V_KIND)
            top = tl.max(tl.abs(of_token), 0)
            top = tl.where(top > 0.0, top, 1.0)
            acc = acc * shrink[:, None] + tl.dot((p * (of_token / top)[None, :]).to(tl.float16), numbers(v, V_KIND)) * top
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = higher
    return m, total, acc


@triton.jit
def quotient(acc, total):
    """acc / total; a row that attends to nothing is zero."""
    return tl.where(total == 0.0, 0.0, acc / total)


@triton.jit(do_not_specialize=["LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb", "stride_mh", "stride_mq"])
def decode_attention_split(
    Q, K, V, K_SCALE, V_SCALE, MASK, OUT, PEAK, SUM, PARTIAL, LENGTH, HEADS, QUERIES, SPLITS, stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_mb, stride_mh, stride_mq, stride_ms, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SCAN: tl.constexpr, MASK_KIND: tl.constexpr,
    PER_ROW: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, BALANCED: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One part of SPLITS for one (sequence, KV head). WHOLE: SPLITS is 1, write OUT. K_SCALE (strides ``x``) and V_SCALE (``y``): of codes alone.

    MASK_KIND: 0 none, 1 bool, 2 floating; 3: MASK is the position of the first query, one int64, and attention is causal.
    """
    if PDL:  # what came before is complete for both kernels once this one goes on
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) % SPLITS
    kv_heads = HEADS // GROUP
    kv_head = tl.program_id(0) // SPLITS % kv_heads
    b = (tl.program_id(0) // SPLITS // kv_heads).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    inside = r < GROUP * QUERIES
    head = kv_head * GROUP + r % GROUP
    query = r // GROUP
    row = head.to(tl.int64) * stride_mh + query * stride_mq
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        Q + b * stride_qb + (head.to(tl.int64) * stride_qh + query * stride_qq)[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
    )
    K += b * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += b * stride_vb + kv_head.to(tl.int64) * stride_vh
    if K_KIND != DENSE:
        K_SCALE += b * stride_xb + kv_head.to(tl.int64) * stride_xh
        V_SCALE += b * stride_yb + kv_head.to(tl.int64) * stride_yh
    if MASK_KIND == 0:
        first, last = tl.full((), 0, tl.int32), LENGTH
    elif MASK_KIND == 3:
        position = tl.load(MASK).to(tl.int32)
        first, last = tl.full((), 0, tl.int32), tl.minimum(position + QUERIES, LENGTH)
        row = position + query
    else:
        MASK += b * stride_mb
        if not PER_ROW:
            MASK += (kv_head * GROUP).to(tl.int64) * stride_mh
        if BALANCED:  # the whole mask
            first, last = attended(MASK, inside, row, 0, LENGTH, stride_ms, SCAN, MASK_KIND, PER_ROW)
        else:  # only this part's: a mask that would take longer than a tile
            even = ((LENGTH + SPLITS - 1) // SPLITS + 127) // 128 * 128
            begin = part * even
            first, last = attended(MASK, inside, row, begin, tl.minimum(begin + even, LENGTH), stride_ms, SCAN, MASK_KIND, PER_ROW)
    begin, end = first, last
    if BALANCED and not WHOLE:
        # In steps of 16 positions: the last tile of a part is cut off, which costs no reading.
        even = ((tl.maximum(last - first, 0) + SPLITS - 1) // SPLITS + 15) // 16 * 16
        begin = tl.minimum(first + part * even, last)
        end = tl.minimum(begin + even, last)
    m, total, acc = attend(
        q, K, V, K_SCALE, V_SCALE, MASK, inside, row, begin, end, stride_ks, stride_vs, stride_xs, stride_ys, stride_ms, scale, MASK_KIND, PER_ROW, K_KIND,
        V_KIND, D, BLOCK_R, BLOCK_S, BLOCK_D,
    )  # fmt: skip
    at = (b * QUERIES + query) * HEADS + head
    ok = inside[:, None] & (d < D)[None, :]
    if WHOLE:
        tl.store(OUT + at[:, None] * D + d[None, :], quotient(acc, total[:, None]).to(OUT.dtype.element_ty), mask=ok)
    else:
        at = at * SPLITS + part
        tl.store(PEAK + at, m, mask=inside)
        tl.store(SUM + at, total, mask=inside)
        if begin < end:
            tl.store(PARTIAL + at[:, None] * D + d[None, :], acc, mask=ok)


@triton.jit(do_not_specialize=["SPLITS"])
def decode_attention_combine(OUT, PEAK, SUM, PARTIAL, SPLITS, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    """One row of OUT from its parts. Of a part without positions only its sum, zero, was written."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    there = part < SPLITS
    total = tl.load(SUM + row * SPLITS + part, mask=there, other=0.0)
    used = there & (total != 0.0)
    m = tl.load(PEAK + row * SPLITS + part, mask=used, other=float("-inf"))
    acc = tl.load(PARTIAL + (row * SPLITS + part)[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
    peak = tl.max(m, 0)
    weight = tl.where(used, tl.exp2(m - tl.where(peak == float("-inf"), 0.0, peak)), 0.0)
    y = quotient(tl.sum(acc * weight[:, None], 0), tl.sum(total * weight, 0))
    tl.store(OUT + row * D + d, y.to(OUT.dtype.element_ty), mask=d < D)
