"""Packed rows -> dense rows, one pass: read 4.5 bits (2:4-sparse: 3.5), write 8, 16 or 32 bits a weight.

A thread takes as many codes at a time as make 16 bytes of output: its stores are 16 bytes wide and a warp's lie side by side, so that
nothing is exchanged between threads. The magnitudes that a code may have under one scale are eight: they are computed and rounded once
(sign and magnitude round apart), and ``prmt``, whose selectors are four bits wide as well, looks four codes up in one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import dense_codes, e2m1_to_f16, e4m3_to_f32

_CODES = """
    and.b32 m, {w}, 0x77777777; shr.b32 n, m, 16; shl.b32 v, {w}, 4;
"""  # m, n: selectors of four magnitudes each; the sign of code i stands on top of byte i of v (even i) or of w

_HALVES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)  # half2 of 0 0.5, 1 1.5, 2 3, 4 6
SIXTEEN_FP8 = tl.constexpr(
    "{ .reg .b32 h, c, p, lo, hi, m, n, v, t, x, y; .reg .b16 a, b; cvt.rn.f16x2.f32 h, $4, $4;"
    + "".join(
        f"mov.b32 c, {pair}; mul.rn.f16x2 p, h, c; cvt.rn.satfinite.e4m3x2.f16x2 {'ab'[i % 2]}, p;" + ("", "mov.b32 lo, {a, b};", "", "mov.b32 hi, {a, b};")[i]
        for i, pair in enumerate(_HALVES)
    )
    + "".join(
        _CODES.format(w=w)
        + f"""prmt.b32 x, lo, hi, m; prmt.b32 t, v, {w}, 0x5140; lop3.b32 x, t, 0x80808080, x, 0xEA;
    prmt.b32 y, lo, hi, n; prmt.b32 t, v, {w}, 0x7362; lop3.b32 y, t, 0x80808080, y, 0xEA; mov.b64 {out}, {{x, y}};"""
        for w, out in (("$2", "$0"), ("$3", "$1"))
    )
    + " }"
)


def _eight(kind: str) -> str:
    """``kind``: of a pair of 16-bit floats. Low and high bytes of the eight magnitudes are tables of their own (l0 l1, h0 h1)."""
    pairs = {"0f00000000": "0f3F000000", "0f3F800000": "0f3FC00000", "0f40000000": "0f40400000", "0f40800000": "0f40C00000"}  # 0 0.5, 1 1.5, 2 3, 4 6
    tables = [
        f"mul.rn.f32 a, $3, {a}; mul.rn.f32 a, a, $4; mul.rn.f32 b, $3, {b}; mul.rn.f32 b, b, $4; cvt.rn.{kind}.f32 {'pq'[i % 2]}, b, a;"
        + (f"prmt.b32 l{i // 2}, p, q, 0x6420; prmt.b32 h{i // 2}, p, q, 0x7531;" if i % 2 else "")
        for i, (a, b) in enumerate(pairs.items())
    ]
    fours = [
        f"""prmt.b32 x, l0, l1, {four}; prmt.b32 y, h0, h1, {four}; prmt.b32 t, v, $2, {signs}; lop3.b32 y, t, 0x80808080, y, 0xEA;
    prmt.b32 p, x, y, 0x5140; prmt.b32 q, x, y, 0x7362; mov.b64 {out}, {{p, q}};"""
        for four, signs, out in (("m", "0x5140", "$0"), ("n", "0x7362", "$1"))
    ]
    return "{ .reg .f32 a, b; .reg .b32 p, q, l0, l1, h0, h1, m, n, v, t, x, y;" + "".join(tables) + _CODES.format(w="$2") + "".join(fours) + " }"


EIGHT_BF16, EIGHT_FP16 = tl.constexpr(_eight("bf16x2")), tl.constexpr(_eight("f16x2"))


@triton.jit
def load_groups(VALUES, META, group, GROUPS):
    """The four dense codes of each 2:4 group in 16 bits, as int32."""
    value = tl.load(VALUES + group, mask=group < GROUPS, other=0)
    nibble = tl.load(META + group // 2, mask=group < GROUPS, other=0).to(tl.int32) >> ((group % 2) * 4).to(tl.int32)
    return dense_codes(value, nibble)


@triton.jit
def decompress_rows(VALUES, META, OUT, GROUPS, BLOCK: tl.constexpr):
    """OUT (16-bit words of four dense codes) from 2:4 groups."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + group, load_groups(VALUES, META, group, GROUPS).to(OUT.dtype.element_ty), mask=group < GROUPS)


@triton.jit
def dense_word(value, meta):
    """int32 words of 8 dense codes from 16 bits of kept codes and 8 of metadata (both int32, higher bits ignored)."""
    return dense_codes(value & 255, meta) | (dense_codes((value >> 8) & 255, meta >> 4) << 16)


@triton.jit
def load_unit(CODES, META, scales, start, at, left, UNIT: tl.constexpr):
    """Codes and scale bytes of units ``start + at``, those below ``left``: UNIT 16: two words of 8, 8: one, 4: 16 bits; all as int32."""
    live = at < left
    s = tl.load(scales + start // (16 // UNIT) + at // (16 // UNIT), mask=live, other=0)
    if META is None:
        word = tl.load(
            CODES.to(tl.pointer_type(tl.int64 if UNIT == 16 else tl.int32 if UNIT == 8 else tl.int16), bitcast=True) + start + at, mask=live, other=0
        )
        if UNIT == 16:
            w0 = word.to(tl.int32)
            w1 = (word >> 32).to(tl.int32)
        else:
            w0 = word.to(tl.int32)
            w1 = w0
    elif UNIT == 4:
        v = tl.load(CODES + start + at, mask=live, other=0).to(tl.int32)
        m = tl.load(META + start // 2 + at // 2, mask=live, other=0).to(tl.int32) >> ((at % 2) * 4)  # start is even
        w0 = dense_codes(v, m)
        w1 = w0
    else:
        v = tl.load(CODES.to(tl.pointer_type(tl.int32 if UNIT == 16 else tl.int16), bitcast=True) + start + at, mask=live, other=0).to(tl.int32)
        m = tl.load(META.to(tl.pointer_type(tl.int16 if UNIT == 16 else tl.uint8), bitcast=True) + start + at, mask=live, other=0).to(tl.int32)
        w0 = dense_word(v, m)
        w1 = dense_word(v >> 16, m >> 8) if UNIT == 16 else w0
    return w0, w1, s


@triton.jit
def sixteen_fp8(w0, w1, s):
    """Two words of codes and float32 ``s`` -> 16 bytes E4M3 of e2m1 * s as two int64. The products are exact in float16: six bits, 2**-13 to 336."""
    return tl.inline_asm_elementwise(SIXTEEN_FP8, "=&l,=&l,r,r,f", [w0, w1, s], dtype=(tl.int64, tl.int64), is_pure=True, pack=1)


@triton.jit
def eight_halves(w, s, g, BF16: tl.constexpr):
    """A word of codes, float32 ``s`` and ``g`` -> 16 bytes of (e2m1 * s) * g, rounded to float32 and then once more, as two int64."""
    return tl.inline_asm_elementwise(EIGHT_BF16 if BF16 else EIGHT_FP16, "=&l,=&l,r,f,f", [w, s, g], dtype=(tl.int64, tl.int64), is_pure=True, pack=1)


@triton.jit
def four_floats(w, s, g, BLOCK: tl.constexpr):
    """The low four codes of ``w`` -> float32 ``[BLOCK, 4]`` of (e2m1 * s) * g."""
    s = s * 16384.0  # e2m1_to_f16's 2**-14
    a = tl.join(e2m1_to_f16(w).to(tl.float32) * s * g, e2m1_to_f16(w >> 8).to(tl.float32) * s * g)
    b = tl.join(e2m1_to_f16(w >> 4).to(tl.float32) * s * g, e2m1_to_f16(w >> 12).to(tl.float32) * s * g)
    return tl.reshape(tl.join(a, b), (BLOCK, 4))


@triton.jit
def matrix_of(first, inside, at, UNITS_PER_MATRIX, SMALL: tl.constexpr):
    """The matrix of unit ``inside + at`` of matrix ``first``; unless SMALL that is ``first`` or the next, and no division is needed."""
    if SMALL:
        return first + (inside + at) // UNITS_PER_MATRIX
    else:
        return first + (inside + at >= UNITS_PER_MATRIX).to(tl.int64)


@triton.jit
def dequantize_rows(
    QDATA, SCALE, GLOBAL_SCALE, OUT, UNITS, UNITS_PER_MATRIX, BATCHED: tl.constexpr, SMALL: tl.constexpr, UNIT: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    META=None, ENDS=None, PARTS: tl.constexpr = 1
):  # fmt: skip
    """OUT = e2m1 * scale * global_scale, rounded to float32 and then to OUT's dtype; without GLOBAL_SCALE: e2m1 * scale * FACTOR in E4M3.

    UNIT: codes a thread takes at a time: 16 to E4M3, 8 to 16-bit floats, 4 to float32 (and, in Triton's interpreter, to anything).
    BATCHED: several matrices, a global scale for each; SMALL: of fewer than BLOCK * STEPS units.
    META: None, or the metadata of a 2:4-sparse weight whose values QDATA then holds.
    ENDS: None, or past the last row that each matrix (PARTS of them) will be multiplied with: what none needs stays unwritten.
    """
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    left = tl.minimum(UNITS - start, BLOCK * STEPS).to(tl.int32)
    wanted = True
    if BATCHED:
        first = start // UNITS_PER_MATRIX
        inside = start - first * UNITS_PER_MATRIX
        if ENDS is not None:
            last = matrix_of(first, inside, left - 1, UNITS_PER_MATRIX, SMALL)
            whole = first // PARTS
            wanted = tl.load(ENDS + last // PARTS) > tl.load(ENDS + whole - 1, mask=whole > 0, other=0)
    if wanted:
        at = tl.arange(0, BLOCK)
        w0, w1, scale = load_unit(QDATA, META, scales, start, at, left, UNIT)
        if GLOBAL_SCALE is None:
            g = FACTOR
        elif not BATCHED:
            g = tl.load(GLOBAL_SCALE)
        for step in tl.static_range(STEPS):
            following = at + BLOCK
            if step + 1 < STEPS:
                n0, n1, next_scale = load_unit(QDATA, META, scales, start, following, left, UNIT)
            s = e4m3_to_f32(scale)
            if BATCHED and GLOBAL_SCALE is not None:
                g = tl.load(GLOBAL_SCALE + matrix_of(first, inside, at, UNITS_PER_MATRIX, SMALL), mask=at < left, other=0.0)
            if UNIT == 4:
                four = start * 4 + at[:, None] * 4 + tl.arange(0, 4)[None, :]
                tl.store(OUT + four, four_floats(w0, s, g, BLOCK).to(OUT.dtype.element_ty), mask=(at < left)[:, None])
            else:
                lo, hi = sixteen_fp8(w0, w1, s * g) if UNIT == 16 else eight_halves(w0, s, g, OUT.dtype.element_ty == tl.bfloat16)
                out = OUT.to(tl.pointer_type(tl.int64), bitcast=True) + start * 2
                tl.store(out + at[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(lo, hi), mask=(at < left)[:, None])
            if step + 1 < STEPS:
                at, w0, w1, scale = following, n0, n1, next_scale
