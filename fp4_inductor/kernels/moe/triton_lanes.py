"""How a thread of :mod:`.triton_decode` loads, converts and multiplies its 32 k of a row, which are called a *lane*.

In shapes L counts the lanes of a step and G the groups, each of which has one activation row. A and B count the rows of the weight: A starts, and B rows near each
(:func:`load_part`). FIRST: lanes are the first dimension; else they are behind the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sparse_linear.triton_sparse_gemv import decode_kept, gather_kept
from ..triton_common import e4m3_to_f32
from ..triton_words import decode8, dot8, half2_dot, pack_half2


@triton.jit
def normaliser(most):
    """Largest magnitudes -> ``(up, down)``: ``up`` is the power of two that brings them to [2**4, 2**5); ``down`` is its inverse times 2**6, which undoes
    the decode's 2**-6.

    If codes are decoded by masks (2**-14 instead of 2**-6), activations are 2**8 times as large, so that ``down`` is the same.
    """
    exponent = most.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, 0x08000000)  # 2**-111: below it activations count as zero
    return ((0x7F000000 - exponent) + 0x02000000).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True) * 4.0


@triton.jit
def place8(j, SPARSE: tl.constexpr, CVT: tl.constexpr):
    """Where element ``j`` of eight lies in the order of :func:`pairs8`."""
    if SPARSE:
        return j
    else:
        half = j // 2
        return 4 * (1 - j % 2) + (half if CVT else half % 2 * 2 + half // 2)


@triton.jit
def pairs8(x, up, SPARSE: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """``[L, G, 8]`` times ``up [L, G]`` -> four half2 (as int32), in the order of the decode, or of k for sparse weights."""
    if not CVT:
        up *= 256.0
    x = tl.reshape(x.to(tl.float32) * up[:, :, None], (x.shape[0], x.shape[1], 2, 2, 2))
    even, odd = tl.split(x)
    if SPARSE:
        y01, y23 = tl.split(tl.permute(pack_half2(even, odd, ASM), (0, 1, 3, 2)))
        y0, y1 = tl.split(y01)
        y2, y3 = tl.split(y23)
    else:
        if not CVT:
            even = tl.permute(even, (0, 1, 3, 2))
            odd = tl.permute(odd, (0, 1, 3, 2))
        even_lo, even_hi = tl.split(even)
        odd_lo, odd_hi = tl.split(odd)
        y0, y1 = tl.split(pack_half2(odd_lo, odd_hi, ASM))
        y2, y3 = tl.split(pack_half2(even_lo, even_hi, ASM))
    return y0, y1, y2, y3


@triton.jit
def by_lane(t, FIRST: tl.constexpr):
    """``[L]`` with dimensions for groups and elements: ``[L, 1, 1]``, or ``[1, L, 1]`` if not FIRST."""
    return t[:, None, None] if FIRST else t[None, :, None]


@triton.jit
def by_group(t, FIRST: tl.constexpr):
    """``[G]`` with dimensions for lanes and elements: ``[1, G, 1]``, or ``[G, 1, 1]`` if not FIRST."""
    return t[None, :, None] if FIRST else t[:, None, None]


@triton.jit
def eights_of_x(X, row, ok, k, C: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """``[L, G, 8]``: eight activations, number C of the four eights of each lane, of the rows ``row [G]``, in the step that begins at ``k``."""
    at = k + C * 8 + by_lane(tl.arange(0, BLOCK_K // 32), FIRST) * 32 + tl.arange(0, 8)[None, None, :]
    ok = by_group(ok, FIRST)
    return tl.load(X + by_group(row, FIRST) * K + at, mask=ok & (at < K) if MASKED else ok, other=0.0)


@triton.jit
def load_x(X, row, ok, k, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """The four eights of each lane."""
    return (
        eights_of_x(X, row, ok, k, 0, K, BLOCK_K, MASKED, FIRST), eights_of_x(X, row, ok, k, 1, K, BLOCK_K, MASKED, FIRST),
        eights_of_x(X, row, ok, k, 2, K, BLOCK_K, MASKED, FIRST), eights_of_x(X, row, ok, k, 3, K, BLOCK_K, MASKED, FIRST),
    )  # fmt: skip


@triton.jit
def most8(x):
    return tl.max(tl.abs(x.to(tl.float32)), 2)


@triton.jit
def lanes_of_x(x, SPARSE: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """From the result of :func:`load_x`: four half2 ``[L, G]`` for each eight, and a factor ``[L, G]`` for each lane."""
    up, down = normaliser(tl.maximum(tl.maximum(most8(x[0]), most8(x[1])), tl.maximum(most8(x[2]), most8(x[3]))))
    a, b = pairs8(x[0], up, SPARSE, CVT, ASM), pairs8(x[1], up, SPARSE, CVT, ASM)
    c, d = pairs8(x[2], up, SPARSE, CVT, ASM), pairs8(x[3], up, SPARSE, CVT, ASM)
    return (a, b, c, d), (down,)


@triton.jit
def eights_of_h(H, row, ok, k, C: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """Four half2 (as int32), each ``[L, G]``, as :func:`pairs8` gives them: of eight number C of each lane, in the step that begins at ``k``."""
    L: tl.constexpr = BLOCK_K // 32
    LENGTH: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * BLOCK_K // 2
    lane = by_lane(tl.arange(0, L), FIRST)
    ok = by_group(ok, FIRST)
    inside = ok & (k + lane * 32 + C * 8 < K) if MASKED else ok
    h = tl.load(H + by_group(row, FIRST) * LENGTH + (k // 2 + C * L * 4 + lane * 4 + tl.arange(0, 4)[None, None, :]), mask=inside, other=0)
    even, odd = tl.split(tl.reshape(h, (h.shape[0], h.shape[1], 2, 2)))
    h0, h2 = tl.split(even)
    h1, h3 = tl.split(odd)
    return h0, h1, h2, h3


@triton.jit
def place_of_h(n, LOG_L, SPARSE: tl.constexpr, CVT: tl.constexpr):
    """Where element ``n`` of a row of h lies for :func:`eights_of_h` with 2**LOG_L lanes a step."""
    lane = n // 32
    return (((((lane >> LOG_L) * 4 + n // 8 % 4) << LOG_L) + (lane & ((1 << LOG_L) - 1))) << 3) + place8(n % 8, SPARSE, CVT)


@triton.jit
def lanes_of_h(H, FACTOR, row, share, ok, k, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """As :func:`lanes_of_x`, from the rows that :func:`moe_decode_up` wrote. There is a factor for each block of 16 k, multiplied by ``share [G]``."""
    h = (
        eights_of_h(H, row, ok, k, 0, K, BLOCK_K, MASKED, FIRST), eights_of_h(H, row, ok, k, 1, K, BLOCK_K, MASKED, FIRST),
        eights_of_h(H, row, ok, k, 2, K, BLOCK_K, MASKED, FIRST), eights_of_h(H, row, ok, k, 3, K, BLOCK_K, MASKED, FIRST),
    )  # fmt: skip
    at = by_lane(k // 16 + tl.arange(0, BLOCK_K // 32) * 2, FIRST) + tl.arange(0, 2)[None, None, :]
    ok = by_group(ok, FIRST)
    factor = tl.load(FACTOR + by_group(row, FIRST) * (K // 16) + at, mask=ok & (at < K // 16) if MASKED else ok, other=0.0)
    return h, tl.split(factor * by_group(share, FIRST))


@triton.jit
def load_part(memory, start, near, ok, k, EACH: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """``[L, A, B, EACH]``: EACH elements for each lane of the step that begins at ``k``, of the rows ``start [A] + near [B]`` (int64) for which ``ok [A, B]``.
    If not FIRST: ``[B, A, L, EACH]``.
    """
    ROW: tl.constexpr = K * EACH // 32
    lane = tl.arange(0, BLOCK_K // 32).to(tl.int64)  # int64, so that the constant part of an address becomes the instruction's offset
    lane = lane[:, None, None, None] if FIRST else lane[None, None, :, None]
    near = near[None, None, :, None] if FIRST else near[:, None, None, None]
    ok = ok[None, :, :, None] if FIRST else tl.trans(ok)[:, :, None, None]
    at = lane * EACH + tl.arange(0, EACH)[None, None, None, :] + k * EACH // 32
    where = (start * ROW)[None, :, None, None] + (near * ROW + at)
    return tl.load(memory + where, mask=ok & (at < ROW) if MASKED else ok, other=0, eviction_policy="evict_first")


@triton.jit
def load_lanes(
    words, metas, scales, start, near, ok, k, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, SPARSE: tl.constexpr, FIRST: tl.constexpr
):
    """Codes, metadata and scales, each as of :func:`load_part`; for a dense weight the scales stand for the metadata. MASKED: the step may reach beyond K."""
    w = load_part(words, start, near, ok, k, 2 if SPARSE else 4, K, BLOCK_K, MASKED, FIRST)
    s = load_part(scales, start, near, ok, k, 2, K, BLOCK_K, MASKED, FIRST)
    if SPARSE:
        return w, load_part(metas, start, near, ok, k, 2, K, BLOCK_K, MASKED, FIRST), s
    else:
        return w, s, s


@triton.jit
def scale_pair(s0, s1, CVT: tl.constexpr):
    """Two E4M3 scales as float32; CVT: by one instruction that converts both."""
    if CVT:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 v; .reg .b16 l, u; cvt.rn.f16x2.e4m3x2 v, $2; mov.b32 {l, u}, v; cvt.f32.f16 $0, l; cvt.f32.f16 $1, u; }",
            "=f,=f,h",
            [s0.to(tl.int16) | (s1.to(tl.int16) << 8)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return e4m3_to_f32(s0), e4m3_to_f32(s1)


@triton.jit
def spread(x, zero, FIRST: tl.constexpr):
    """``[L, G]`` broadcast to the rows ``[L, A, B]`` of ``zero``, or ``[G, L]`` to ``[B, A, L]``."""
    return (x[:, :, None] if FIRST else x[None, :, :]) + zero


@triton.jit
def dot16(w, v, x, y, FIRST: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr):
    """float32 dot product of a block: the 16 codes of the words ``w`` and ``v`` with the activations ``x`` and ``y``."""
    zero = tl.zeros(w.shape, tl.int32)
    a0, a1, a2, a3 = decode8(w, CVT)
    b0, b1, b2, b3 = decode8(v, CVT)
    x0, x1, x2, x3 = spread(x[0], zero, FIRST), spread(x[1], zero, FIRST), spread(x[2], zero, FIRST), spread(x[3], zero, FIRST)
    y0, y1, y2, y3 = spread(y[0], zero, FIRST), spread(y[1], zero, FIRST), spread(y[2], zero, FIRST), spread(y[3], zero, FIRST)
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a; .reg .b16 l, u; .reg .f32 f0, f1;
            mul.rn.f16x2 a, $1, $9; fma.rn.f16x2 a, $2, $10, a; fma.rn.f16x2 a, $3, $11, a; fma.rn.f16x2 a, $4, $12, a;
            fma.rn.f16x2 a, $5, $13, a; fma.rn.f16x2 a, $6, $14, a; fma.rn.f16x2 a, $7, $15, a; fma.rn.f16x2 a, $8, $16, a;
            mov.b32 {l, u}, a; cvt.f32.f16 f0, l; cvt.f32.f16 f1, u; add.f32 $0, f0, f1; }""",
            "=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, y0, y1, y2, y3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        p = half2_dot(a0, x0) + half2_dot(a1, x1) + half2_dot(a2, x2) + half2_dot(a3, x3)
        return p + half2_dot(b0, y0) + half2_dot(b1, y1) + half2_dot(b2, y2) + half2_dot(b3, y3)


@triton.jit
def kept_dot16(w, m, x, y, FIRST: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr):
    """float32 dot product of a block: the 8 kept codes of the word ``w`` with those of its 16 activations that the metadata in the low half of ``m`` names.
    ``x``: the activations of groups 0 and 1; ``y``: of groups 2 and 3.
    """
    zero = tl.zeros(w.shape, tl.int32)
    h0, h1, h2, h3 = decode_kept(w, CVT)
    x0, x1, x2, x3 = gather_kept(
        m, spread(x[0], zero, FIRST), spread(x[2], zero, FIRST), spread(y[0], zero, FIRST), spread(y[2], zero, FIRST),
        spread(x[1], zero, FIRST), spread(x[3], zero, FIRST), spread(y[1], zero, FIRST), spread(y[3], zero, FIRST), ASM,
    )  # fmt: skip
    return dot8(h0, h1, h2, h3, x0, x1, x2, x3, ASM)


@triton.jit
def add_lanes(acc, w, m, s, x, factor, FIRST: tl.constexpr, SPARSE: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """``acc`` (float32 ``[L, A, B]``) plus the products of the result of :func:`load_lanes` with the activations ``x`` and their factors. There is one factor
    for a lane, or one for each block.
    """
    if SPARSE:
        w0, w1 = tl.split(w)
        m0, m1 = tl.split(m)
        both = (m0.to(tl.int32) & 0xFFFF) | (m1.to(tl.int32) << 16)  # both words, as they were loaded; kept_dot16() reads the low half
        p0 = kept_dot16(w0, both, x[0], x[1], FIRST, ASM, CVT)
        p1 = kept_dot16(w1, both >> 16, x[2], x[3], FIRST, ASM, CVT)
    else:
        even, odd = tl.split(tl.reshape(w, (w.shape[0], w.shape[1], w.shape[2], 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        p0 = dot16(w0, w1, x[0], x[1], FIRST, ASM, CVT)
        p1 = dot16(w2, w3, x[2], x[3], FIRST, ASM, CVT)
    s0, s1 = tl.split(s)
    s0, s1 = scale_pair(s0, s1, CVT)
    if len(factor) == 1:
        acc += (p0 * s0 + p1 * s1) * spread(factor[0], 0.0, FIRST)
    else:
        acc += p0 * (s0 * spread(factor[0], 0.0, FIRST))
        acc += p1 * (s1 * spread(factor[1], 0.0, FIRST))
    return acc
