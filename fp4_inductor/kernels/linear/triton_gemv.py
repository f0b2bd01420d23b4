"""One to four rows: a bandwidth-bound GEMV on canonical row-major NVFP4.

A program owns BLOCK_N rows of the weight and walks K in steps of BLOCK_W words (8 codes each). Per word: decode to four
half2, four HFMA2 against the activations, two conversions and one add; then one float32 FMA per block with the scale.
Activations become half precision inside the kernel, each block of 16 normalised by its own power of two, so that any
bfloat16 range is safe and the conversion costs 2**-11 at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e4m3_to_f32, global_scale_of, store_output
from ..triton_words import decode8, partial_sums


@triton.jit
def linear_gemv(
    X, QDATA, SCALE, GLOBAL_SCALE, Y, M, N, K8, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr,
    B1: tl.constexpr = 0, B2: tl.constexpr = 0,
):  # fmt: skip
    words = QDATA.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    K = K8 * 8
    pid_n = tl.program_id(0)
    row0 = tl.program_id(1).to(tl.int64) * BLOCK_M
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    word_row = rn.to(tl.int64)[:, None] * K8
    scale_row = rn.to(tl.int64)[:, None] * (K8 // 2)
    a0 = tl.zeros((BLOCK_N, BLOCK_W // 2), tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    for k in range(0, K8, BLOCK_W):
        kw = k + tl.arange(0, BLOCK_W)
        ks = k // 2 + tl.arange(0, BLOCK_W // 2)
        if EVEN:
            w = tl.load(words + word_row + kw[None, :], eviction_policy="evict_first")
            s = tl.load(scales + scale_row + ks[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(words + word_row + kw[None, :], mask=(rn < N)[:, None] & (kw < K8)[None, :], other=0, eviction_policy="evict_first")
            s = tl.load(scales + scale_row + ks[None, :], mask=(rn < N)[:, None] & (ks < K8 // 2)[None, :], other=0, eviction_policy="evict_first")
        s = e4m3_to_f32(s)
        h0, h1, h2, h3 = decode8(w, CVT)
        a0 += partial_sums(X, row0, M, k * 8, K, h0, h1, h2, h3, s, BLOCK_N, BLOCK_W, EVEN and BLOCK_M == 1, CVT, ASM)
        if BLOCK_M > 1:
            a1 += partial_sums(X, row0 + 1, M, k * 8, K, h0, h1, h2, h3, s, BLOCK_N, BLOCK_W, EVEN and BLOCK_M == 1, CVT, ASM)
        if BLOCK_M > 2:
            a2 += partial_sums(X, row0 + 2, M, k * 8, K, h0, h1, h2, h3, s, BLOCK_N, BLOCK_W, EVEN and BLOCK_M == 1, CVT, ASM)
            a3 += partial_sums(X, row0 + 3, M, k * 8, K, h0, h1, h2, h3, s, BLOCK_N, BLOCK_W, EVEN and BLOCK_M == 1, CVT, ASM)
    idx_m = row0 + tl.arange(0, BLOCK_M)[:, None]
    idx_n = rn[None, :]
    y = tl.sum(a0, 1)[None, :]
    if BLOCK_M > 1:
        y = tl.where(idx_m == row0 + 1, tl.sum(a1, 1)[None, :], y)
    if BLOCK_M > 2:
        y = tl.where(idx_m == row0 + 2, tl.sum(a2, 1)[None, :], y)
        y = tl.where(idx_m == row0 + 3, tl.sum(a3, 1)[None, :], y)
    y = y * global_scale_of(GLOBAL_SCALE, idx_n, B1, B2)
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
