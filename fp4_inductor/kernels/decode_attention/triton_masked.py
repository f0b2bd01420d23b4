"""Attention of many queries over a mask that all heads share: keys that a tile of queries does not attend to are not read.

``pack_mask`` reads the mask once. Of each tile of BLOCK_M queries and each block of 64 keys it writes

    FOUND   a byte       do none, some or all of the queries attend to all of the keys?
    SEEN    64 bytes     does any of the queries attend to this key?
    BITS    64 bits a query, which are read as two words of 32

and ``masked_attention`` finds in FOUND which blocks its tile reads:

    begin .. first   from the first block of which something is read    the bits are looked at
    first .. last    the first run of blocks that are read whole        nothing is looked at
    last .. end      up to the last block of which something is read    the bits are looked at

A causal prompt of T tokens so takes half of T x T products, a sliding window what it is wide, and padding nothing. Softmax is online, in base 2 and float32
(:mod:`..cached_attention.triton_prefill`). A row that attends to nothing is zero. Values that no query of the tile attends to are read as zeros, because
there may be NaN in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cached_attention.triton_prefill import load_tile, weights

NONE, SOME, ALL = 0, 1, 2
WORD = 64  # keys of a block: bits of a word
_SOME, _ALL, _WORD = tl.constexpr(SOME), tl.constexpr(ALL), tl.constexpr(WORD)


@triton.jit(do_not_specialize=["QUERIES", "LENGTH"])
def pack_mask(MASK, FOUND, SEEN, BITS, QUERIES, LENGTH, stride_b, stride_q, stride_s, BLOCK_M: tl.constexpr):
    """Program (block of keys, tile of queries, sequence). FOUND ``[sequences, tiles, blocks]``, SEEN ``[sequences, tiles, 64 blocks]``, BITS ``[sequences, Q, blocks]``."""
    block, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks, tiles = tl.num_programs(0), tl.num_programs(1)
    i = tl.arange(0, _WORD)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * _WORD + i
    inside = m < QUERIES
    at = MASK + b * stride_b + m.to(tl.int64)[:, None] * stride_q + n[None, :] * stride_s
    seen = (tl.load(at, mask=inside[:, None] & (n < LENGTH)[None, :], other=0) != 0).to(tl.int64)
    tl.store(BITS + (b * QUERIES + m) * blocks + block, tl.sum(seen << i.to(tl.int64)[None, :], 1), mask=inside)
    any_row = tl.max(seen, 0)
    of_tile = (b * tiles + tile) * blocks + block
    tl.store(SEEN + of_tile * _WORD + i, any_row.to(tl.uint8))
    some = tl.max(any_row, 0)
    whole = tl.min(tl.min(tl.where(inside[:, None], seen, 1), 1), 0)  # rows behind the last query do not count
    tl.store(FOUND + of_tile, (some + whole * some).to(tl.uint8))


@triton.jit
def masked_steps(begin, end, q, K, V, SEEN, BITS, m_at, acc, peak, total, QUERIES, LENGTH, BLOCKS, stride_ks, stride_vs, scale, CHECK: tl.constexpr,
                 D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Blocks ``begin`` to ``end - 1``. CHECK: the bits are looked at; else all queries attend to all keys."""
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(begin * _WORD, end * _WORD, BLOCK_N, num_stages=STAGES):
        used, some = m_at[:, None] >= 0, n >= 0
        if CHECK:
            key = tl.zeros((), tl.int32) + start  # the interpreter counts in Python's numbers
            at = BITS + (m_at.to(tl.int64) * BLOCKS * 2 + key // 32)
            word = tl.load(at, mask=m_at < QUERIES, other=0)[:, None]
            if BLOCK_N == 64:
                word = tl.where((n < 32)[None, :], word, tl.load(at + 1, mask=m_at < QUERIES, other=0)[:, None])
            used = ((word >> ((key + n) % 32)[None, :]) & 1) != 0
            some = tl.load(SEEN + start + n) != 0
        k = load_tile(K, start, LENGTH, stride_ks, n, CHECK, some, False, D, BLOCK_D)
        peak, total, shrink, p = weights(tl.dot(q, tl.trans(k)), used, peak, total, scale, 0.0, False, CHECK)
        v = load_tile(V, start, LENGTH, stride_vs, n, CHECK, some, CHECK, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, peak, total


@triton.jit(do_not_specialize=["QUERIES", "LENGTH", "BLOCKS", "HEADS", "SEQUENCES"])
def masked_attention(
    Q, K, V, FOUND, SEEN, BITS, OUT, QUERIES, LENGTH, BLOCKS, HEADS, SEQUENCES, stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_ks, stride_vb,
    stride_vh, stride_vs, scale, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """BLOCK_M queries of one head; tiles with the highest queries begin first. BLOCK_N divides 64. ``scale``: above 0, times log2(e).

    FOUND, SEEN, BITS: of ``pack_mask``, for all sequences (SEQUENCES 1) or for each. SCAN >= BLOCKS.
    """
    tiles = tl.cdiv(QUERIES, BLOCK_M)
    of_all = tl.program_id(0)
    tile = tiles - 1 - of_all % tiles
    head = of_all // tiles % HEADS
    b = (of_all // tiles // HEADS).to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    m_at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    ok = (m_at < QUERIES)[:, None] & (d < D)[None, :]
    K += b * stride_kb + kv_head * stride_kh
    V += b * stride_vb + kv_head * stride_vh
    masked = b if SEQUENCES > 1 else b * 0
    FOUND += (masked * tiles + tile) * BLOCKS
    SEEN += (masked * tiles + tile) * BLOCKS * _WORD
    BITS += masked * QUERIES * BLOCKS * 2
    q = tl.load(Q + b * stride_qb + head.to(tl.int64) * stride_qh + m_at.to(tl.int64)[:, None] * stride_qq + d[None, :], mask=ok, other=0.0)

    i = tl.arange(0, SCAN)
    found = tl.load(FOUND + i, mask=i < BLOCKS, other=0).to(tl.int32)
    end = tl.max(tl.where(found >= _SOME, i + 1, 0), 0)
    begin = tl.min(tl.where(found >= _SOME, i, end), 0)
    first = tl.min(tl.where(found == _ALL, i, end), 0)
    last = tl.min(tl.where((found != _ALL) & (i > first), i, end), 0)

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc, peak, total = masked_steps(
        begin, first, q, K, V, SEEN, BITS, m_at, acc, peak, total, QUERIES, LENGTH, BLOCKS, stride_ks, stride_vs, scale, True, D, BLOCK_N, BLOCK_D, STAGES
    )  # fmt: skip
    acc, peak, total = masked_steps(
        first, last, q, K, V, SEEN, BITS, m_at, acc, peak, total, QUERIES, LENGTH, BLOCKS, stride_ks, stride_vs, scale, False, D, BLOCK_N, BLOCK_D, STAGES
    )  # fmt: skip
    acc, peak, total = masked_steps(
        last, end, q, K, V, SEEN, BITS, m_at, acc, peak, total, QUERIES, LENGTH, BLOCKS, stride_ks, stride_vs, scale, True, D, BLOCK_N, BLOCK_D, STAGES
    )  # fmt: skip
    y = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    to = (b * QUERIES + m_at.to(tl.int64)) * HEADS + head
    tl.store(OUT + (to * D)[:, None] + d[None, :], y.to(OUT.dtype.element_ty), mask=ok)
