"""Activations to NVFP4 in one pass: 16 neighbours share a scale, two neighbours a byte; the rows' own scales are given.

The contract's steps bit for bit: IEEE divisions, E4M3 and E2M1 by rounding to nearest, ties to even. By integers, or by
comparisons, where the hardware has no conversion (and in Triton's interpreter).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e4m3_to_f32


@triton.jit
def f32_to_e4m3(v):
    """float32 >= 0 -> E4M3 codes (int32), saturating at 448: 3 mantissa bits of the same bits, or 2**-9 below the normals."""
    bits = tl.minimum(v, 448.0).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2**23 leaves no fraction bits: what is behind the point is rounded to even.
    subnormal = (v * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(v < 0.015625, subnormal, normal)


@triton.jit
def block_code(s):
    """float32 >= 0 -> E4M3 code (int32); a positive number never becomes zero."""
    return tl.where(s > 0.0, tl.minimum(tl.maximum(f32_to_e4m3(s), 1), 126), 0)


@triton.jit
def f32_to_e2m1(v):
    """float32 -> codes (int32): the comparison that a tie passes is the one towards the even code."""
    a = tl.abs(v)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((v.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def pack_e2m1(lo, hi, CVT: tl.constexpr):
    """Pairs of float32 -> bytes, ``lo`` in the low nibble."""
    if CVT:
        return tl.inline_asm_elementwise(
            """{ .reg .b8 a, b, c, d;
            cvt.rn.satfinite.e2m1x2.f32 a, $5, $1; cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 c, $7, $3; cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
            mov.b32 $0, {a, b, c, d}; }""",
            "=r,r,r,r,r,r,r,r,r",
            [lo, hi],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        return (f32_to_e2m1(lo) | (f32_to_e2m1(hi) << 4)).to(tl.uint8)


@triton.jit
def quantize_blocks(X, ROW_SCALE, QDATA, SCALE, BLOCKS, BLOCK: tl.constexpr, CVT: tl.constexpr):
    """``X`` ``[M, BLOCKS, 16]`` -> codes (bytes) and scales (E4M3 bytes); a program takes BLOCK blocks of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < BLOCKS
    r = tl.broadcast_to(tl.load(ROW_SCALE + row), (BLOCK,))
    usable = r == r
    r = tl.where(usable, r, 1.0)
    x = tl.load(X + row * BLOCKS * 16 + at[:, None] * 16 + tl.arange(0, 16)[None, :], mask=(live & usable)[:, None], other=0.0).to(tl.float32)
    one = tl.full((BLOCK,), 1.0, tl.float32)
    code = tl.maximum(f32_to_e4m3(tl.max(tl.abs(x), 1) * tl.div_rn(one, r * 6.0)), 1)
    v = x * tl.div_rn(one, e4m3_to_f32(code) * r)[:, None]
    lo, hi = tl.split(tl.reshape(v, (BLOCK, 8, 2)))
    tl.store(SCALE + row * BLOCKS + at, code.to(tl.uint8), mask=live)
    tl.store(QDATA + row * BLOCKS * 8 + at[:, None] * 8 + tl.arange(0, 8)[None, :], pack_e2m1(lo, hi, CVT), mask=live[:, None])
