"""Many new tokens of a cache in 8 or 4 bits: one launch that rounds and writes them, and one that reads old ones as numbers.

:mod:`fp4_inductor.formats.kv` has the formats, bit for bit: the launcher switches the contraction of products and sums off, and all divisions are IEEE's.
A program takes BLOCK_N tokens of one KV head of one sequence; its second number is 0 for keys and 1 for values.

*The mean of keys.* Where the cache is empty every program that rounds keys sums the first tokens for itself, always in the same order: a few reads from L2
in the place of a launch that all would wait for.

*Numbers.* Both kernels write them to memory of one row a token, ``OUT [B * Hkv, ROWS, D]``: with ABSOLUTE the token at the position p has row p, else row
BACK + p - held, where ``held`` is how many tokens came before. Rows of one call are then written by both kernels, old tokens by one and new ones by the other.

*Exact tokens.* With NEAR the tokens of which exact copies are attended to are copied to ``NEAR [B * Hkv, NEAR_BACK + QUERIES, D]`` likewise, as they are.
With FIRST_EXACT the first tokens are exact in OUT, too, because no query attends to their rounded copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_quantized import FP8, NVFP4, exact_slot, load_rows, quantized, store_rows, to_numbers


@triton.jit
def first_mean(KEY, QUERIES, stride, MEAN_TOKENS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 ``[BLOCK_D]``: the mean of what is finite in the first new keys of one head."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    count = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, tl.minimum(QUERIES, MEAN_TOKENS), BLOCK_M):
        n = start + tl.arange(0, BLOCK_M)
        there = (n < tl.minimum(QUERIES, MEAN_TOKENS))[:, None] & (d < D)[None, :]
        x = tl.load(KEY + (n.to(tl.int64) * stride)[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
        finite = there & ((x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000)
        total += tl.sum(tl.where(finite, x, 0.0), 0)
        count += tl.sum(finite.to(tl.float32), 0)
    return tl.div_rn(total, tl.maximum(count, 1.0))


@triton.jit
def dequantized(code, block, size, KIND: tl.constexpr):
    """``[N, D]`` float32: codes times block scales (exact), times the token's scale in float32 (rounded once)."""
    even, odd = to_numbers(code, block, KIND)
    if KIND == NVFP4:
        x = tl.reshape(tl.join(even, odd), (code.shape[0], code.shape[1] * 2)).to(tl.float32) * 256.0
    elif KIND == FP8:
        x = even.to(tl.float32) * 256.0
    else:
        x = even.to(tl.float32)
    return x * size.to(tl.float32)[:, None]


@triton.jit
def store_tokens(OUT, row, ok, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write ``x [N, BLOCK_D]`` to the rows ``row`` of ``[.., D]``."""
    d = tl.arange(0, BLOCK_D)
    tl.store(OUT + (row * D)[:, None] + d[None, :], x.to(OUT.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def append_one(
    NEW, CODES, SCALE, BLOCKS, EXACT, OUT, NEAR, mean, of_all, n, held, room, QUERIES, SLOTS, EXACT_SLOTS, ROWS, BACK, NEAR_BACK, stride, MEAN: tl.constexpr,
    KIND: tl.constexpr, TOP: tl.constexpr, FIRST: tl.constexpr, HAS_EXACT: tl.constexpr, FIRST_EXACT: tl.constexpr, HAS_NEAR: tl.constexpr, RING: tl.constexpr,
    ABSOLUTE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Round the tokens ``n`` of keys (less ``mean``) or of values (whose mean is zero), and write all that is to be had of them."""
    d = tl.arange(0, BLOCK_D)
    there = n < QUERIES
    at = held + n
    raw = tl.load(NEW + (n.to(tl.int64) * stride)[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    x = raw.to(tl.float32)
    code, block, size = quantized(x - mean[None, :], KIND, TOP, True)
    there_and_room = n < tl.where(room, QUERIES, 0)
    written = there_and_room & (n >= QUERIES - SLOTS)
    slot = at % SLOTS if RING else at
    store_rows(CODES, SCALE, BLOCKS, of_all * SLOTS + slot, written, code, block, size, D, KIND)
    y = dequantized(code, block, size, KIND)
    if MEAN:
        y += mean[None, :]  # without one a negative zero stays one
    if FIRST_EXACT:
        y = tl.where((at < FIRST)[:, None], x, y)
    if ABSOLUTE:
        store_tokens(OUT, of_all * ROWS + at, there_and_room, y, D, BLOCK_D)
    else:
        store_tokens(OUT, of_all * ROWS + BACK + n, there, tl.where(room, y, float("nan")), D, BLOCK_D)
    if HAS_EXACT:
        kept = there_and_room & ((at < FIRST) | (n >= QUERIES - (EXACT_SLOTS - FIRST)))
        store_tokens(EXACT, of_all * EXACT_SLOTS + exact_slot(at, EXACT_SLOTS, FIRST), kept, raw, D, BLOCK_D)
    if HAS_NEAR:
        store_tokens(NEAR, of_all * (NEAR_BACK + QUERIES) + NEAR_BACK + n, there, raw, D, BLOCK_D)


@triton.jit(do_not_specialize=["SLOTS", "EXACT_SLOTS", "HEADS", "QUERIES", "ROWS", "BACK", "NEAR_BACK"])
def append_rows(
    KEY, VALUE, K, V, K_SCALE, V_SCALE, K_BLOCKS, V_BLOCKS, MEAN, EXACT_K, EXACT_V, POSITION, OUT_K, OUT_V, NEAR_K, NEAR_V, SLOTS, EXACT_SLOTS, HEADS,
    QUERIES, ROWS, BACK, NEAR_BACK, stride_nb, stride_nh, stride_nq, stride_wb, stride_wh, stride_wq, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_TOP: tl.constexpr, V_TOP: tl.constexpr, FIRST: tl.constexpr, MEAN_TOKENS: tl.constexpr, EXACT: tl.constexpr, FIRST_EXACT: tl.constexpr,
    NEAR: tl.constexpr, RING: tl.constexpr, ABSOLUTE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rounded, in one pass. HEADS: KV heads. KEY (strides ``n``) and VALUE (``w``): the new tokens. The cache and what belongs to it is contiguous.

    Beyond its end a cache is not written; OUT is NaN then, or with ABSOLUTE not written.
    """
    tiles = tl.cdiv(QUERIES, BLOCK_N)
    of_all = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles  # an interpreter, in which programs follow each other, would hide that two write one slot of a ring
    b = of_all // HEADS
    kv_head = of_all % HEADS
    held = tl.load(POSITION).to(tl.int32)
    room = held >= 0
    if not RING:
        room = room & (held + QUERIES <= SLOTS)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        KEY += b * stride_nb + kv_head * stride_nh
        mean = tl.load(MEAN + of_all * D + d, mask=d < tl.where(held != 0, D, 0), other=0.0)
        if held == 0:
            mean = first_mean(KEY, QUERIES, stride_nq, MEAN_TOKENS, D, BLOCK_M, BLOCK_D)
            if tile == 0:
                tl.store(MEAN + of_all * D + d, mean, mask=d < tl.where(room, D, 0))
        append_one(
            KEY, K, K_SCALE, K_BLOCKS, EXACT_K, OUT_K, NEAR_K, mean, of_all, n, held, room, QUERIES, SLOTS, EXACT_SLOTS, ROWS, BACK, NEAR_BACK, stride_nq,
            True, K_KIND, K_TOP, FIRST, EXACT, FIRST_EXACT, NEAR, RING, ABSOLUTE, D, BLOCK_D,
        )  # fmt: skip
    else:
        append_one(
            VALUE + b * stride_wb + kv_head * stride_wh, V, V_SCALE, V_BLOCKS, EXACT_V, OUT_V, NEAR_V, tl.zeros((BLOCK_D,), tl.float32), of_all, n, held,
            room, QUERIES, SLOTS, EXACT_SLOTS, ROWS, BACK, NEAR_BACK, stride_wq, False, V_KIND, V_TOP, FIRST, EXACT, FIRST_EXACT, NEAR, RING, ABSOLUTE, D, BLOCK_D,
        )  # fmt: skip


@triton.jit
def dequantize_one(
    CODES, SCALE, BLOCKS, EXACT, OUT, mean, of_all, row, at, ok, SLOTS, EXACT_SLOTS, ROWS, MEAN: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    FIRST_EXACT: tl.constexpr, RING: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Write the tokens at the positions ``at`` to the rows ``row`` of OUT, as numbers."""
    d = tl.arange(0, BLOCK_D)
    slot = at % SLOTS if RING else at
    code, block, size = load_rows(CODES, SCALE, BLOCKS, of_all * SLOTS + slot, ok, D, BLOCK_D, KIND)
    y = dequantized(code, block, size, KIND)
    if MEAN:
        y += mean[None, :]  # without one a negative zero stays one
    if FIRST_EXACT:
        first = ok & (at < FIRST)
        x = tl.load(EXACT + ((of_all * EXACT_SLOTS + at) * D)[:, None] + d[None, :], mask=first[:, None] & (d < D)[None, :], other=0.0)
        y = tl.where(first[:, None], x.to(tl.float32), y)
    store_tokens(OUT, of_all * ROWS + row, ok, y, D, BLOCK_D)


@triton.jit
def copy_exact(EXACT, NEAR, of_all, held, EXACT_SLOTS, QUERIES, NEAR_BACK, FIRST: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The exact tokens at the NEAR_BACK positions before the new ones."""
    d = tl.arange(0, BLOCK_D)
    for start in range(0, NEAR_BACK, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        at = held - NEAR_BACK + row
        ok = (row < NEAR_BACK) & (at >= 0)
        slot = exact_slot(tl.maximum(at, 0), EXACT_SLOTS, FIRST)
        x = tl.load(EXACT + ((of_all * EXACT_SLOTS + slot) * D)[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
        store_tokens(NEAR, of_all * (NEAR_BACK + QUERIES) + row, ok, x, D, BLOCK_D)


@triton.jit(do_not_specialize=["SLOTS", "EXACT_SLOTS", "TILES", "QUERIES", "ROWS", "BACK", "NEAR_BACK"])
def dequantize_rows(
    K, V, K_SCALE, V_SCALE, K_BLOCKS, V_BLOCKS, MEAN, EXACT_K, EXACT_V, POSITION, OUT_K, OUT_V, NEAR_K, NEAR_V, SLOTS, EXACT_SLOTS, TILES, QUERIES, ROWS,
    BACK, NEAR_BACK, K_KIND: tl.constexpr, V_KIND: tl.constexpr, FIRST: tl.constexpr, FIRST_EXACT: tl.constexpr, NEAR: tl.constexpr, COUNTED: tl.constexpr,
    RING: tl.constexpr, ABSOLUTE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The tokens that came before, TILES times BLOCK_N rows of them. COUNTED: as many as POSITION says; else all ROWS of them. NEAR: a tile more, the last."""
    tiles = TILES + 1 if NEAR else TILES
    of_all = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    held = ROWS
    if COUNTED:
        held = tl.load(POSITION).to(tl.int32)
    if NEAR:  # noqa: SIM102  (a constant, without which the rest is not compiled)
        if tile == TILES:
            if tl.program_id(1) == 0:
                copy_exact(EXACT_K, NEAR_K, of_all, held, EXACT_SLOTS, QUERIES, NEAR_BACK, FIRST, BLOCK_N, D, BLOCK_D)
            else:
                copy_exact(EXACT_V, NEAR_V, of_all, held, EXACT_SLOTS, QUERIES, NEAR_BACK, FIRST, BLOCK_N, D, BLOCK_D)
            return
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row if ABSOLUTE else held - BACK + row
    begin = tile * BLOCK_N if ABSOLUTE else held - BACK + tile * BLOCK_N
    if begin >= held:
        return
    ok = (row < ROWS) & (at >= 0) & (at < held)
    d = tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        mean = tl.load(MEAN + of_all * D + d, mask=d < D, other=0.0)
        dequantize_one(
            K, K_SCALE, K_BLOCKS, EXACT_K, OUT_K, mean, of_all, row, at, ok, SLOTS, EXACT_SLOTS, ROWS, True, K_KIND, FIRST, FIRST_EXACT, RING, D, BLOCK_D
        )
    else:
        mean = tl.zeros((BLOCK_D,), tl.float32)
        dequantize_one(
            V, V_SCALE, V_BLOCKS, EXACT_V, OUT_V, mean, of_all, row, at, ok, SLOTS, EXACT_SLOTS, ROWS, False, V_KIND, FIRST, FIRST_EXACT, RING, D, BLOCK_D
        )
