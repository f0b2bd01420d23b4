"""One decode step of ``fp4.cached_attention`` over a cache in 8 or 4 bits, in one launch; :mod:`fp4_inductor.formats.kv` has the formats.

Programs, parts, counters and PDL are those of :mod:`.triton_step`. What differs:

*Products.* All tensor-core products are of float16 numbers, whatever the dtype of the query: codes times block scales are exact in it. A row of the query
is scaled by a power of two to below 2**15, which is undone in the scores. The scale of a token is multiplied into its score, and into its weight before
the weight meets the values, so that no number of the cache is multiplied by it. Weights are divided by the largest scale of their tile, so that float16
holds them however large the values are.

*Codes of four bits.* A byte holds the numbers 2 i and 2 i + 1. Both stay where they are: there is one product with the even numbers and one with the odd
ones, and an output for each. Only the last rows, 16 of them, are interleaved.

*The mean of keys.* q . (k + mean) = q . k + q . mean. The second term is the same for all rounded tokens, so it is left out, unless something compares
these scores with others: exact tokens, sinks, or a soft-cap.

*New tokens.* The last part rounds and writes them, by the steps of ``formats.kv.quantize``, and reads them again behind a barrier as it reads old ones: there
is one loop for both. The other parts have old tokens only, so no program reads what another one writes.

*Exact tokens.* The last part attends to them too, the new ones among them. The other parts share the positions that are rounded for some query. The new
tokens take the slots of older ones, so the launcher asks for a ring that keeps, besides the new ones, the LAST - 1 tokens before the first of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize_rows_nvfp4.triton_blocks import block_code, f32_to_e2m1, f32_to_e4m3
from ..triton_common import e2m1_to_f16, e4m3_to_f32
from .triton_step import add_tile, finish, parts_of, place, prepared, unmasked

FP8 = tl.constexpr(0)
INT8 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)


# --- numbers ----------------------------------------------------------------------------------------------------


@triton.jit
def e4m3_to_f16(byte):
    """E4M3 bytes -> float16 value * 2**-8, exact. No code is NaN: a token with NaN has a scale that is."""
    b = byte.to(tl.int16)
    return (((b & 0x80) << 8) | ((b & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def int8_to_f16(byte):
    """Bytes of int8 -> float16, exact: the bits 0x6400 + u are the number 1024 + u."""
    return ((byte.to(tl.int16) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def pairs_to_f16(byte, block):
    """Bytes of two codes ``[S, D/2]`` and of block scales ``[S, D/16]`` -> even and odd numbers ``[S, D/2]``, float16 value * 2**-8, exact."""
    S: tl.constexpr = byte.shape[0]
    HALF: tl.constexpr = byte.shape[1]
    code = tl.reshape(byte.to(tl.int16), (S, HALF // 8, 8))
    factor = (e4m3_to_f16(block) * 16384.0)[:, :, None]  # 2**14: e2m1_to_f16 gives value * 2**-14
    even = e2m1_to_f16(code) * factor
    odd = e2m1_to_f16(code >> 4) * factor
    return tl.reshape(even, (S, HALF)), tl.reshape(odd, (S, HALF))


@triton.jit
def to_numbers(byte, block, KIND: tl.constexpr):
    """Codes of a kind -> (numbers, numbers), float16 without the token's scale: of NVFP4 the even and the odd ones, else twice the same."""
    if KIND == NVFP4:
        even, odd = pairs_to_f16(byte, block)
    elif KIND == INT8:
        even = int8_to_f16(byte)
        odd = even
    else:
        even = e4m3_to_f16(byte)
        odd = even
    return even, odd


# --- rounding the new tokens ------------------------------------------------------------------------------------


@triton.jit
def scaled(x, TOP: tl.constexpr):
    """float32 rows -> (scale, rows / scale). The scale is float16; NaN of a row with NaN or Inf, zero of a row of zeros."""
    amax = tl.max(tl.abs(x), 1)
    finite = tl.max(((x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32), 1) == 0
    some = finite & (amax > 0.0)
    exact = tl.div_rn(tl.where(some, amax, 0.0), tl.full(amax.shape, TOP, tl.float32))
    scale = tl.minimum(tl.maximum(exact, 5.9604644775390625e-08), 65504.0).to(tl.float16)
    scale = tl.where(some, scale, 0.0).to(tl.float16)
    y = tl.div_rn(tl.where(finite[:, None], x, 0.0), tl.broadcast_to(tl.where(some, scale.to(tl.float32), 1.0)[:, None], x.shape))
    return tl.where(finite, scale, float("nan")).to(tl.float16), y


@triton.jit
def divided(groups, code):
    """``[N, D/16, 16]`` by the block scales ``[N, D/16]``."""
    s = e4m3_to_f32(code)
    return tl.div_rn(groups, tl.broadcast_to(tl.where(s > 0.0, s, 1.0)[:, :, None], groups.shape))


@triton.jit
def rounded_blocks(groups, code):
    """(codes, squared error of each block) with the block scales ``code``."""
    codes = f32_to_e2m1(divided(groups, code))
    d = groups - e2m1_to_f16(codes).to(tl.float32) * 16384.0 * e4m3_to_f32(code)[:, :, None]
    return codes, tl.sum(d * d, 2)


@triton.jit
def quantized(x, KIND: tl.constexpr, TOP: tl.constexpr, KEEP: tl.constexpr = False):
    """float32 rows ``[N, D]`` -> (codes as bytes, block scales as bytes, scale) of a kind; without blocks the second is the first.

    KEEP: the codes by both scales of a block are kept until one is chosen; else they are computed again, which takes fewer registers.
    """
    scale, y = scaled(x, TOP)
    if KIND == NVFP4:
        N: tl.constexpr = x.shape[0]
        D: tl.constexpr = x.shape[1]
        groups = tl.reshape(y, (N, D // 16, 16))
        amax = tl.max(tl.abs(groups), 2)
        six = block_code(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))
        four = block_code(amax * 0.25)
        by_six, error_six = rounded_blocks(groups, six)
        by_four, error_four = rounded_blocks(groups, four)
        less = error_four < error_six
        block = tl.where(less, four, six)
        if KEEP:
            chosen = tl.where(less[:, :, None], by_four, by_six)
        else:
            chosen = f32_to_e2m1(divided(groups, block))
        low, high = tl.split(tl.reshape(chosen, (N, D // 2, 2)))
        return (low | (high << 4)).to(tl.uint8), block.to(tl.uint8), scale
    else:
        if KIND == INT8:
            y = (y + 12582912.0) - 12582912.0  # 1.5 * 2**23 leaves no fraction bits: rounded to even
            code = tl.minimum(tl.maximum(y, -127.0), 127.0).to(tl.int32) & 0xFF
        else:
            code = f32_to_e4m3(tl.abs(y)) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
        code = code.to(tl.uint8)
        return code, code, scale


@triton.jit
def store_rows(CODES, SCALE, BLOCKS, row, ok, code, block, scale, D: tl.constexpr, KIND: tl.constexpr):
    """Write tokens at the rows ``row`` of a contiguous cache."""
    PACKED: tl.constexpr = 2 if KIND == NVFP4 else 1
    d = tl.arange(0, code.shape[1])
    tl.store(CODES + (row * (D // PACKED))[:, None] + d[None, :], code, mask=ok[:, None] & (d < D // PACKED)[None, :])
    tl.store(SCALE + row, scale, mask=ok)
    if KIND == NVFP4:
        e = tl.arange(0, block.shape[1])
        tl.store(BLOCKS + (row * (D // 16))[:, None] + e[None, :], block, mask=ok[:, None] & (e < D // 16)[None, :])


@triton.jit
def mean_of(x, there):
    """float32 ``[N, D]`` -> ``[D]``: the mean of what is finite in the rows that are there."""
    finite = there[:, None] & ((x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000)
    return tl.div_rn(tl.sum(tl.where(finite, x, 0.0), 0), tl.maximum(tl.sum(finite.to(tl.float32), 0), 1.0))


# --- attention --------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(CODES, SCALE, BLOCKS, row, ok, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr):
    """Tokens at the rows ``row``: (codes, block scales, scale in float32); zeros where they are not ``ok``."""
    PACKED: tl.constexpr = 2 if KIND == NVFP4 else 1
    d = tl.arange(0, BLOCK_D // PACKED)
    code = tl.load(CODES + (row * (D // PACKED))[:, None] + d[None, :], mask=ok[:, None] & (d < D // PACKED)[None, :], other=0)
    scale = tl.load(SCALE + row, mask=ok, other=0.0).to(tl.float32)
    block = code
    if KIND == NVFP4:
        e = tl.arange(0, BLOCK_D // 16)
        block = tl.load(BLOCKS + (row * (D // 16))[:, None] + e[None, :], mask=ok[:, None] & (e < D // 16)[None, :], other=0)
    return code, block, scale


@triton.jit
def query_numbers(q, scale):
    """Rows of the query -> float16 rows below 2**15, and what their products with codes are multiplied by: ``scale`` and the power of two undone."""
    exponent = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2**(14 - e)
    return (q.to(tl.float32) * up[:, None]).to(tl.float16), ((exponent - 14) << 23).to(tl.float32, bitcast=True) * scale


@triton.jit
def add_rounded(
    q, q_odd, factor, shift, k_code, k_block, k_scale, v_code, v_block, v_scale, used, m, total, acc, acc_odd, softcap, SOFTCAP: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr
):  # fmt: skip
    """Online softmax, base 2: (maximum, sum, output, output of the odd numbers) after one more tile of rounded tokens."""
    k, k_odd = to_numbers(k_code, k_block, K_KIND)
    s = tl.dot(q, tl.trans(k))
    if K_KIND == NVFP4:
        s = tl.dot(q_odd, tl.trans(k_odd), s)
    s = s * factor[:, None] * (k_scale if K_KIND == INT8 else k_scale * 256.0)[None, :] + shift[:, None]
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / softcap)))
    s = tl.where(used, s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    p = tl.exp2(s - reference[:, None])
    shrink = tl.exp2(m - reference)
    top = tl.max(v_scale, 0)
    weight = (p * (v_scale / tl.where(top > 0.0, top, 1.0))[None, :]).to(tl.float16)
    undo = tl.where(top > 0.0, top, 1.0) * 256.0
    v, v_odd = to_numbers(v_code, v_block, V_KIND)
    acc = acc * shrink[:, None] + tl.dot(weight, v) * undo
    if V_KIND == NVFP4:
        acc_odd = acc_odd * shrink[:, None] + tl.dot(weight, v_odd) * undo
    return higher, total * shrink + tl.sum(p, 1), acc, acc_odd


@triton.jit
def rows_of(MASK, rows, begin, end, SLOTS, LENGTH, stride_mp, MASKED: tl.constexpr, RING: tl.constexpr, BLOCK_S: tl.constexpr):
    """The rows of the cache, whose first is ``rows``, in which the tokens of a tile lie, and which of them are attended to."""
    at = begin + tl.arange(0, BLOCK_S)
    some = at < end
    if MASKED:
        some = unmasked(MASK, at, some, LENGTH, stride_mp)
    slot = begin % SLOTS + tl.arange(0, BLOCK_S) if RING else at
    if RING:
        slot = tl.where(slot >= SLOTS, slot - SLOTS, slot)
    return rows + slot, some


@triton.jit
def attended(at, some, query, EXACT: tl.constexpr, LAST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """``[R, S]``: does each query, at the position ``query``, attend to the rounded copy of each token?"""
    used = tl.broadcast_to(some[None, :], (BLOCK_R, BLOCK_S))
    used = used & (at[None, :] <= (query[:, None] - LAST if EXACT else query[:, None]))
    if WINDOW > 0:
        used = used & (at[None, :] > query[:, None] - WINDOW)
    return used


@triton.jit
def exact_slot(at, EXACT_SLOTS, FIRST: tl.constexpr):
    """Where the token at the position ``at`` lies among the exact ones. As ``formats.kv.exact_slot``."""
    return tl.where(at < FIRST, at, FIRST + (at - FIRST) % (EXACT_SLOTS - FIRST))


@triton.jit
def add_exact(
    q, EXACT_K, EXACT_V, MASK, rows, held, query, QUERIES, EXACT_SLOTS, LENGTH, stride_mp, m, total, acc, scale, softcap, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The tokens that some query attends to exactly: the first ones, and those from LAST - 1 before the first query to the last. ``rows``: the first row."""
    d = tl.arange(0, BLOCK_D)
    for start in range(0, FIRST + LAST + QUERIES - 1, BLOCK_E):
        i = start + tl.arange(0, BLOCK_E)
        at = tl.where(i < FIRST, i, held - LAST + 1 + i - FIRST)
        there = (at < held + QUERIES) & ((i < FIRST) | (at >= FIRST))
        if WINDOW > 0:
            there = there & (at > held - WINDOW)
        if MASKED:
            there = unmasked(MASK, at, there, LENGTH, stride_mp)
        used = there[None, :] & (at[None, :] <= query[:, None]) & ((at < FIRST)[None, :] | (at[None, :] > query[:, None] - LAST))
        if WINDOW > 0:
            used = used & (at[None, :] > query[:, None] - WINDOW)
        ok = there[:, None] & (d < D)[None, :]
        to = ((rows + exact_slot(at, EXACT_SLOTS, FIRST)) * D)[:, None] + d[None, :]
        k = tl.load(EXACT_K + to, mask=ok, other=0.0)
        v = tl.load(EXACT_V + to, mask=ok, other=0.0)
        m, total, acc = add_tile(q, k, v, used, m, total, acc, scale, softcap, SOFTCAP)
    return m, total, acc


@triton.jit(do_not_specialize=["SLOTS", "EXACT_SLOTS", "LENGTH", "HEADS", "QUERIES", "SPLITS", "stride_mb"])
def cached_attention_quantized(
    Q, KEY, VALUE, K, V, K_SCALE, V_SCALE, K_BLOCKS, V_BLOCKS, MEAN, EXACT_K, EXACT_V, POSITION, MASK, SINKS, Q_NORM, K_NORM, COS, SIN, OUT, PEAK, SUM,
    PARTIAL, ARRIVALS, SLOTS, EXACT_SLOTS, LENGTH, HEADS, QUERIES, SPLITS, stride_qb, stride_qh, stride_qq, stride_nb, stride_nh, stride_nq, stride_wb,
    stride_wh, stride_wq, stride_mb, stride_mp, stride_cb, stride_cq, scale, softcap, eps, offset, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_TOP: tl.constexpr, V_TOP: tl.constexpr, EXACT: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    ROTARY: tl.constexpr, ANGLES: tl.constexpr, LEAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One part of at most SPLITS for one (sequence, KV head), as ``triton_step.cached_attention_step``. The cache and all that belongs to it is contiguous.

    EXACT: the format has exact tokens, EXACT_SLOTS of them; a query at q attends exactly to positions below FIRST and above q - LAST.
    """
    RING: tl.constexpr = WINDOW > 0
    PAIRED: tl.constexpr = V_KIND == NVFP4
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part, of_all, b, kv_head, held, room = place(POSITION, SLOTS, HEADS, QUERIES, SPLITS, GROUP, RING)
    first = tl.maximum(held - WINDOW + 1, 0) if RING else tl.zeros_like(held)
    upto = held
    if EXACT:
        first = tl.maximum(first, FIRST)
        upto = tl.maximum(held + QUERIES - LAST, first)
    each, parts = parts_of(upto - first, SPLITS, LEAST)
    if part >= parts:
        return
    begin = first + part * each
    last = part == parts - 1
    old_end = tl.minimum(begin + each, upto)
    end = old_end
    if not EXACT:
        end = tl.where(last, held + QUERIES, end)

    rows = of_all.to(tl.int64) * SLOTS
    if MASKED:
        MASK += b * stride_mb
    offset_s = tl.arange(0, BLOCK_S)
    if EARLY:  # MASKED is False
        row, early_some = rows_of(MASK, rows, begin, old_end, SLOTS, LENGTH, stride_mp, False, RING, BLOCK_S)
        early_k, early_k_block, early_k_scale = load_rows(K, K_SCALE, K_BLOCKS, row, early_some, D, BLOCK_D, K_KIND)
        early_v, early_v_block, early_v_scale = load_rows(V, V_SCALE, V_BLOCKS, row, early_some, D, BLOCK_D, V_KIND)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    r = tl.arange(0, BLOCK_R)
    inside = r < GROUP * QUERIES
    head = kv_head * GROUP + r % GROUP
    query = held + r // GROUP  # its position
    d = tl.arange(0, BLOCK_D)
    q = prepared(
        Q + b * stride_qb, head.to(tl.int64) * stride_qh + (r // GROUP) * stride_qq, inside, Q_NORM, COS, SIN, b * stride_cb + (r // GROUP) * stride_cq, eps, offset,
        NORM_Q, ROTARY, ANGLES, D, BLOCK_D,
    )  # fmt: skip
    numbers, factor = query_numbers(q, scale)
    q_even = numbers
    q_odd = numbers
    if K_KIND == NVFP4:
        q_even, q_odd = tl.split(tl.reshape(numbers, (BLOCK_R, BLOCK_D // 2, 2)))
    mean = tl.load(MEAN + of_all.to(tl.int64) * D + d, mask=d < D, other=0.0)
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)

    if last:
        n = tl.arange(0, BLOCK_N)
        there = n < QUERIES
        near = n.to(tl.int64)
        key = prepared(
            KEY + b * stride_nb + kv_head.to(tl.int64) * stride_nh, near * stride_nq, there, K_NORM, COS, SIN, b * stride_cb + near * stride_cq, eps, offset,
            NORM_K, ROTARY, ANGLES, D, BLOCK_D,
        )  # fmt: skip
        ok = there[:, None] & (d < D)[None, :]
        value = tl.load(VALUE + b * stride_wb + kv_head.to(tl.int64) * stride_wh + (near * stride_wq)[:, None] + d[None, :], mask=ok, other=0.0)
        written = n < tl.where(room, QUERIES, 0)
        mean = tl.where(held == 0, mean_of(key.to(tl.float32), there), mean)
        tl.store(MEAN + of_all.to(tl.int64) * D + d, mean, mask=d < tl.where(room & (held == 0), D, 0))
        to = rows + ((held + n) % SLOTS if RING else held + n)
        code, block, size = quantized(key.to(tl.float32) - mean[None, :], K_KIND, K_TOP)
        store_rows(K, K_SCALE, K_BLOCKS, to, written, code, block, size, D, K_KIND)
        code, block, size = quantized(value.to(tl.float32), V_KIND, V_TOP)
        store_rows(V, V_SCALE, V_BLOCKS, to, written, code, block, size, D, V_KIND)
        if EXACT:
            exact = of_all.to(tl.int64) * EXACT_SLOTS
            to = ((exact + exact_slot(held + n, EXACT_SLOTS, FIRST)) * D)[:, None] + d[None, :]
            ok = written[:, None] & (d < D)[None, :]
            tl.store(EXACT_K + to, key, mask=ok)
            tl.store(EXACT_V + to, value, mask=ok)
        tl.debug_barrier()  # all threads of this program see what each of them wrote
        if EXACT:
            m, total, acc = add_exact(
                q, EXACT_K, EXACT_V, MASK, exact, held, query, QUERIES, EXACT_SLOTS, LENGTH, stride_mp, m, total, acc, scale, softcap, SOFTCAP, MASKED,
                WINDOW, FIRST, LAST, D, BLOCK_E, BLOCK_D,
            )  # fmt: skip
    shift = tl.zeros((BLOCK_R,), tl.float32)
    if EXACT or SOFTCAP or SINK:
        shift = tl.sum(q.to(tl.float32) * mean[None, :], 1) * scale
    acc_odd = acc
    if PAIRED:
        acc, acc_odd = tl.split(tl.reshape(acc, (BLOCK_R, BLOCK_D // 2, 2)))
    if EARLY:
        used = attended(begin + offset_s, early_some, query, EXACT, LAST, WINDOW, BLOCK_R, BLOCK_S)
        m, total, acc, acc_odd = add_rounded(
            q_even, q_odd, factor, shift, early_k, early_k_block, early_k_scale, early_v, early_v_block, early_v_scale, used, m, total, acc, acc_odd,
            softcap, SOFTCAP, K_KIND, V_KIND,
        )  # fmt: skip
        begin = tl.minimum(begin + BLOCK_S, old_end)
    for start in range(begin, end, BLOCK_S):
        row, some = rows_of(MASK, rows, start, end, SLOTS, LENGTH, stride_mp, MASKED, RING, BLOCK_S)
        k, k_block, k_scale = load_rows(K, K_SCALE, K_BLOCKS, row, some, D, BLOCK_D, K_KIND)
        v, v_block, v_scale = load_rows(V, V_SCALE, V_BLOCKS, row, some, D, BLOCK_D, V_KIND)
        used = attended(start + offset_s, some, query, EXACT, LAST, WINDOW, BLOCK_R, BLOCK_S)
        m, total, acc, acc_odd = add_rounded(
            q_even, q_odd, factor, shift, k, k_block, k_scale, v, v_block, v_scale, used, m, total, acc, acc_odd, softcap, SOFTCAP, K_KIND, V_KIND
        )  # fmt: skip

    if PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), (BLOCK_R, BLOCK_D))
    finish(
        OUT, PEAK, SUM, PARTIAL, ARRIVALS, SINKS, m, total, acc, room, part, parts, of_all, b, kv_head, HEADS, QUERIES, SPLITS, GROUP, SINK, D, BLOCK_R, BLOCK_D,
        BLOCK_G, BLOCK_P, WHOLE,
    )  # fmt: skip
