"""Dot products on packed words of eight E2M1 codes in half2: what the GEMV kernels and the decode kernels of MoE layers share.

Source of the decode: NVFP4's four bits sit in an E4M3 byte as ``(w & 0x80) | ((w >> 2) & 0x1C)`` = value * 2**-6, which
one instruction turns into half2 (sm_89 and later); elsewhere masks place them in float16 as value * 2**-14.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode8(w, CVT: tl.constexpr):
    """int32 words of 8 codes -> four half2 (as int32): pairs (1,3) (5,7) (0,2) (4,6) * 2**-6, or (1,5) (3,7) (0,4) (2,6) * 2**-14."""
    if CVT:
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            """{ .reg .b32 r0, r1, v, t; .reg .b16 l, u;
            shr.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 r1, $4, 0x80808080, t, 0xEA;
            shl.b32 v, $4, 4; shl.b32 t, $4, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 r0, v, 0x80808080, t, 0xEA;
            mov.b32 {l, u}, r1; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, u;
            mov.b32 {l, u}, r0; cvt.rn.f16x2.e4m3x2 $2, l; cvt.rn.f16x2.e4m3x2 $3, u; }""",
            "=r,=r,=r,=r,r",
            [w],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        # pairs (n, n + 4): nibble n at bits 15..12, nibble n + 4 at bits 31..28 after a left shift by 4 * (3 - n)
        # and the magnitude bits below them at 11..9
        h0 = ((w << 8) & -2147450880) | ((w << 5) & 0x0E000E00)
        h1 = (w & -2147450880) | ((w >> 3) & 0x0E000E00)
        h2 = ((w << 12) & -2147450880) | ((w << 9) & 0x0E000E00)
        h3 = ((w << 4) & -2147450880) | ((w << 1) & 0x0E000E00)
    return h0, h1, h2, h3


@triton.jit
def half2_dot(a, b):
    """float32 dot product of two half2 words, without inline PTX."""
    al = (a & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    ah = (a >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    bl = (b & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    bh = (b >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return al * bl + ah * bh


@triton.jit
def dot8(h0, h1, h2, h3, x0, x1, x2, x3, ASM: tl.constexpr):
    """float32 sum of eight products of half2 words."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a; .reg .b16 l, u; .reg .f32 f0, f1;
            mul.rn.f16x2 a, $1, $5; fma.rn.f16x2 a, $2, $6, a; fma.rn.f16x2 a, $3, $7, a; fma.rn.f16x2 a, $4, $8, a;
            mov.b32 {l, u}, a; cvt.f32.f16 f0, l; cvt.f32.f16 f1, u; add.f32 $0, f0, f1; }""",
            "=f,r,r,r,r,r,r,r,r",
            [h0, h1, h2, h3, x0, x1, x2, x3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return half2_dot(h0, x0) + half2_dot(h1, x1) + half2_dot(h2, x2) + half2_dot(h3, x3)


@triton.jit
def pack_half2(lo, hi, ASM: tl.constexpr):
    """Two float32 tensors -> half2 as int32."""
    if ASM:  # one packed conversion; two scalar ones run at a quarter of its rate
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = lo.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (hi.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def load_activations(X, row, M, k, K, BLOCK_W: tl.constexpr, FULL: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """One row's 8 * BLOCK_W activations from ``k``: four half2 words in :func:`decode8`'s order, and each scale block's factor.

    A block of 16 is normalised to [2**8, 2**9) by a power of two; the factor returned undoes that and the decode's 2**-6 or 2**-14.
    """
    offsets = k + tl.arange(0, BLOCK_W * 8)
    if FULL:
        x = tl.load(X + row * K + offsets).to(tl.float32)
    else:
        x = tl.load(X + row * K + offsets, mask=offsets < tl.where(row < M, K, 0), other=0.0).to(tl.float32)
    x = tl.reshape(x, (BLOCK_W // 2, 16))
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, 0x08000000)  # 2**-111: below it activations count as zero
    up = ((0x7F000000 - exponent) + 0x04000000).to(tl.float32, bitcast=True)  # 2**(8 - e)
    x = tl.reshape(x * up[:, None], (BLOCK_W, 2, 2, 2))
    even, odd = tl.split(x)
    if not CVT:
        even = tl.permute(even, (0, 2, 1))
        odd = tl.permute(odd, (0, 2, 1))
    even_lo, even_hi = tl.split(even)
    odd_lo, odd_hi = tl.split(odd)
    x0, x1 = tl.split(pack_half2(odd_lo, odd_hi, ASM))
    x2, x3 = tl.split(pack_half2(even_lo, even_hi, ASM))
    undo = exponent.to(tl.float32, bitcast=True) * (0.25 if CVT else 64.0)  # 2**-8 * 2**6, or 2**-8 * 2**14
    return x0, x1, x2, x3, undo


@triton.jit
def partial_sums(X, row, M, k, K, h0, h1, h2, h3, s, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, FULL: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr):
    """float32 ``[BLOCK_N, BLOCK_W / 2]``: one number per scale block."""
    x0, x1, x2, x3, undo = load_activations(X, row, M, k, K, BLOCK_W, FULL, CVT, ASM)
    zero = tl.zeros((BLOCK_N, BLOCK_W), tl.int32)
    p = dot8(h0, h1, h2, h3, x0[None, :] + zero, x1[None, :] + zero, x2[None, :] + zero, x3[None, :] + zero, ASM)
    return tl.sum(tl.reshape(p, (BLOCK_N, BLOCK_W // 2, 2)), 2) * (s * undo[None, :])
