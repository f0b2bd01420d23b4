"""Triton helpers shared by the kernels: number decoding and the eager form of a template's store.

Everything is bit arithmetic or inline PTX under a constexpr, so that the same source runs in Triton's interpreter
(``ASM=False``), compiles ahead of time for every architecture from sm_80, and becomes an Inductor template.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_f32(byte):
    """Non-negative E4M3 bytes (uint8) -> float32, subnormals included; no FP8 type is needed, so sm_80 can run it."""
    return ((byte.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def e2m1_to_f16(code):
    """E2M1 codes (low 4 bits of an integer tensor) -> float16 value * 2**-14, exact."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def global_scale_of(GLOBAL_SCALE, rows, B1: tl.constexpr, B2: tl.constexpr):
    """The scale of each weight row: one for all (B1 == 0), or of up to three siblings, the second from row B1, the third from B2."""
    if B1 > 0:
        return tl.load(GLOBAL_SCALE + (rows >= B1).to(tl.int32) + (rows >= B2).to(tl.int32))
    else:
        return tl.load(GLOBAL_SCALE)


@triton.jit
def dense_codes(values, nibble):
    """2:4 groups (integers: a byte of two kept codes, a metadata nibble) -> 16-bit words of the four dense codes, as int32."""
    value = values.to(tl.int32)
    nibble = nibble.to(tl.int32)
    return ((value & 15) << ((nibble & 3) * 4)) | ((value >> 4) << (((nibble >> 2) & 3) * 4))


@triton.jit
def decompressed(v, m, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes of two kept codes ``[BLOCK_N, BLOCK_K / 4]`` and of two metadata nibbles ``[.., BLOCK_K / 8]`` -> dense codes uint8 ``[.., BLOCK_K / 2]``."""
    word = dense_codes(v, tl.reshape(tl.join(m, m >> 4), (BLOCK_N, BLOCK_K // 4)))
    return tl.reshape(tl.join(word, word >> 8), (BLOCK_N, BLOCK_K // 2)).to(tl.uint8)


@triton.jit
def store_output(Y, idx_m, idx_n, y, mask, N):
    """Eager form of Inductor's ``store_output``: row-major ``Y[M, N]``."""
    tl.store(Y + idx_m.to(tl.int64) * N + idx_n, y.to(Y.dtype.element_ty), mask=mask)
