"""Packed rows -> dense rows, one pass: read 4.5 bits (2:4-sparse: 3.5), write 8, 16 or 32 bits a weight."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import dense_codes, e2m1_to_f16, e4m3_to_f32


@triton.jit
def load_codes(QDATA, META, start, BYTES, BLOCK: tl.constexpr):
    """BLOCK bytes of dense codes from ``start``, int16. With META, QDATA holds the values of 2:4 groups of two such bytes each."""
    if META is None:
        byte = start + tl.arange(0, BLOCK)
        q = tl.load(QDATA + byte, mask=byte < BYTES, other=0).to(tl.int16)
    else:
        word = load_groups(QDATA, META, start // 2 + tl.arange(0, BLOCK // 2), BYTES // 2)
        q = tl.reshape(tl.join(word & 255, word >> 8), (BLOCK,)).to(tl.int16)
    return q


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
def dequantize_rows(QDATA, SCALE, GLOBAL_SCALE, OUT, BYTES, GROUPS_PER_MATRIX, EXTRA, BATCHED: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, META=None):
    """OUT = e2m1 * scale * global_scale rounded once, or with FP8: OUT = e2m1 * scale * EXTRA in E4M3, global_scale left out.

    BYTES: of dense codes. META: None, or the metadata of a 2:4-sparse weight whose values QDATA then holds.
    """
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    group = start // 8 + tl.arange(0, BLOCK // 8)
    q = load_codes(QDATA, META, start, BYTES, BLOCK)
    s = e4m3_to_f32(tl.load(scales + group, mask=group < BYTES // 8, other=0))
    value = tl.join(e2m1_to_f16(q), e2m1_to_f16(q >> 4)).to(tl.float32) * 16384.0
    value = tl.reshape(value, (BLOCK // 8, 16))
    if FP8:
        value = value * (s * EXTRA)[:, None]
    else:
        value = value * s[:, None]
        if BATCHED:
            g = tl.load(GLOBAL_SCALE + group // GROUPS_PER_MATRIX, mask=group < BYTES // 8, other=0.0)
            value = value * g[:, None]
        else:
            value = value * tl.load(GLOBAL_SCALE)
    out = start * 2 + tl.arange(0, BLOCK * 2)
    tl.store(OUT + out, tl.reshape(value, (BLOCK * 2,)).to(OUT.dtype.element_ty), mask=out // 2 < BYTES)  # 2 * BYTES may not fit 32 bits
