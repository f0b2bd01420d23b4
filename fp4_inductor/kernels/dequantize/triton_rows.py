"""Packed rows -> dense rows, one pass: read 4.5 bits, write 8, 16 or 32 bits a weight."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e2m1_to_f16, e4m3_to_f32


@triton.jit
def dequantize_rows(QDATA, SCALE, GLOBAL_SCALE, OUT, BYTES, GROUPS_PER_MATRIX, EXTRA, BATCHED: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = e2m1 * scale * global_scale rounded once, or with FP8: OUT = e2m1 * scale * EXTRA in E4M3, global_scale left out."""
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    byte = start + tl.arange(0, BLOCK)
    group = start // 8 + tl.arange(0, BLOCK // 8)
    q = tl.load(QDATA + byte, mask=byte < BYTES, other=0).to(tl.int16)
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
    tl.store(OUT + out, tl.reshape(value, (BLOCK * 2,)).to(OUT.dtype.element_ty), mask=out < BYTES * 2)
