"""One row: a dot product on the kept codes of a 2:4-sparse weight, the activations gathered by byte permutes.

Bandwidth-bound, so instructions per kept weight decide. A word of 8 kept codes is one scale block of
16 k. Its codes become half2 words as in the dense kernel; for each group of four k, ``prmt`` picks the two activations of
the kept positions out of the group's four. A legal metadata nibble n has the index (n ^ n >> 1) & 7, all different, by
which two more ``prmt`` look the selectors up, four groups at once. Any nibble gives selectors inside the eight bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e4m3_to_f32, global_scale_of, store_output
from ..triton_words import dot8, pack_half2


@triton.jit
def decode_kept(w, CVT: tl.constexpr):
    """int32 words of 8 kept codes -> four half2 (as int32), group by group: value * 2**-6, or * 2**-14."""
    if CVT:
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            """{ .reg .b32 r0, r1, p, t; .reg .b16 l, u;
            shr.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 r1, $4, 0x80808080, t, 0xEA;
            shl.b32 p, $4, 4; shl.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 r0, p, 0x80808080, t, 0xEA;
            prmt.b32 p, r0, r1, 0x5140; mov.b32 {l, u}, p; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, u;
            prmt.b32 p, r0, r1, 0x7362; mov.b32 {l, u}, p; cvt.rn.f16x2.e4m3x2 $2, l; cvt.rn.f16x2.e4m3x2 $3, u; }""",
            "=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        h0 = kept_pair(w)
        h1 = kept_pair(w >> 8)
        h2 = kept_pair(w >> 16)
        h3 = kept_pair(w >> 24)
    return h0, h1, h2, h3


@triton.jit
def kept_pair(w):
    """The two codes of the low byte -> half2 of value * 2**-14."""
    t = (w & 0xF) | ((w & 0xF0) << 12)
    return ((t << 12) & -2147450880) | ((t & 0x00070007) << 9)


@triton.jit
def gather_kept(m, a0, a1, a2, a3, b0, b1, b2, b3, ASM: tl.constexpr):
    """Four metadata nibbles and the halves (k 0 1: a, k 2 3: b) of four groups -> half2 of each group's two kept activations."""
    if ASM:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            """{ .reg .b32 g, lo, hi, s;
            shr.b32 g, $4, 1; xor.b32 g, $4, g; and.b32 g, g, 0x7777;
            prmt.b32 lo, 0x32105410, 0x10103210, g; prmt.b32 hi, 0x76767632, 0x32325454, g;
            prmt.b32 s, lo, hi, 0x0040; prmt.b32 $0, $5, $9, s;
            prmt.b32 s, lo, hi, 0x0051; prmt.b32 $1, $6, $10, s;
            prmt.b32 s, lo, hi, 0x0062; prmt.b32 $2, $7, $11, s;
            prmt.b32 s, lo, hi, 0x0073; prmt.b32 $3, $8, $12, s; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [m, a0, a1, a2, a3, b0, b1, b2, b3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        x0 = kept_halves(m, a0, b0)
        x1 = kept_halves(m >> 4, a1, b1)
        x2 = kept_halves(m >> 8, a2, b2)
        x3 = kept_halves(m >> 12, a3, b3)
    return x0, x1, x2, x3


@triton.jit
def kept_halves(nibble, a, b):
    """The activations at pos0 (low half) and pos1 (high half) of one group, without inline PTX."""
    first = tl.where((nibble & 2) != 0, b, a) >> ((nibble & 1) * 16)
    second = tl.where((nibble & 8) != 0, b, a) >> (((nibble >> 2) & 1) * 16)
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def load_blocks(X, row, M, k, K, BLOCK_W: tl.constexpr, FULL: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """One row's 16 * BLOCK_W activations from ``k``: the halves a, b of each block's four groups, and each block's factor.

    A block is normalised to [2**8, 2**9) by a power of two; the factor undoes that and the decode's 2**-6 or 2**-14.
    """
    offsets = k + tl.arange(0, BLOCK_W * 16)
    if FULL:
        x = tl.load(X + row * K + offsets).to(tl.float32)
    else:
        x = tl.load(X + row * K + offsets, mask=offsets < tl.where(row < M, K, 0), other=0.0).to(tl.float32)
    x = tl.reshape(x, (BLOCK_W, 16))
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, 0x08000000)  # 2**-111: below it activations count as zero
    up = ((0x7F000000 - exponent) + 0x04000000).to(tl.float32, bitcast=True)  # 2**(8 - e)
    lo, hi = tl.split(tl.reshape(x * up[:, None], (BLOCK_W, 2, 2, 2, 2)))  # group: two bits, half, parity
    a, b = tl.split(pack_half2(lo, hi, ASM))
    a02, a13 = tl.split(a)
    b02, b13 = tl.split(b)
    a0, a2 = tl.split(a02)
    a1, a3 = tl.split(a13)
    b0, b2 = tl.split(b02)
    b1, b3 = tl.split(b13)
    undo = exponent.to(tl.float32, bitcast=True) * (0.25 if CVT else 64.0)  # 2**-8 * 2**6, or 2**-8 * 2**14
    return a0, a1, a2, a3, b0, b1, b2, b3, undo


@triton.jit
def kept_dot(w, m, s, a0, a1, a2, a3, b0, b1, b2, b3, undo, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """float32 ``[BLOCK_N, BLOCK_W]``, one number per block of 16 k: words, metadata and scales of rows against what :func:`load_blocks` gave."""
    zero = tl.zeros((BLOCK_N, BLOCK_W), tl.int32)
    h0, h1, h2, h3 = decode_kept(w, CVT)
    x0, x1, x2, x3 = gather_kept(
        m.to(tl.int32), a0[None, :] + zero, a1[None, :] + zero, a2[None, :] + zero, a3[None, :] + zero,
        b0[None, :] + zero, b1[None, :] + zero, b2[None, :] + zero, b3[None, :] + zero, ASM,
    )  # fmt: skip
    return dot8(h0, h1, h2, h3, x0, x1, x2, x3, ASM) * (e4m3_to_f32(s) * undo[None, :])


@triton.jit
def sparse_gemv(
    X, VALUES, META, SCALE, GLOBAL_SCALE, Y, M, N, B, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr,
    B1: tl.constexpr = 0, B2: tl.constexpr = 0,
):  # fmt: skip
    words = VALUES.to(tl.pointer_type(tl.int32), bitcast=True)
    metas = META.to(tl.pointer_type(tl.int16), bitcast=True)
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    K = B * 16
    row = tl.program_id(1).to(tl.int64)
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = rn.to(tl.int64)[:, None] * B
    acc = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for k in range(0, B, BLOCK_W):
        kb = k + tl.arange(0, BLOCK_W)
        if EVEN:
            w = tl.load(words + start + kb[None, :], eviction_policy="evict_first")
            m = tl.load(metas + start + kb[None, :], eviction_policy="evict_first")
            s = tl.load(scales + start + kb[None, :], eviction_policy="evict_first")
        else:
            inside = (rn < N)[:, None] & (kb < B)[None, :]
            w = tl.load(words + start + kb[None, :], mask=inside, other=0, eviction_policy="evict_first")
            m = tl.load(metas + start + kb[None, :], mask=inside, other=0, eviction_policy="evict_first")
            s = tl.load(scales + start + kb[None, :], mask=inside, other=0, eviction_policy="evict_first")
        a0, a1, a2, a3, b0, b1, b2, b3, undo = load_blocks(X, row, M, k * 16, K, BLOCK_W, EVEN, CVT, ASM)
        acc += kept_dot(w, m, s, a0, a1, a2, a3, b0, b1, b2, b3, undo, BLOCK_N, BLOCK_W, CVT, ASM)
    idx_m = row + tl.arange(0, BLOCK_M)[:, None]
    idx_n = rn[None, :]
    y = tl.sum(acc, 1)[None, :] * global_scale_of(GLOBAL_SCALE, idx_n, B1, B2)
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
