"""One row (or few): the GEMV of :mod:`..linear.gemv` over rows n of gate and up at once, and their product.

A program owns BLOCK_N rows of each half, so its tile, its loads and its inner loop are those of a GEMV with
2 * BLOCK_N rows; only the row numbers and the last lines differ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e4m3_to_f32, store_output
from ..triton_words import decode8, partial_sums


@triton.jit
def activate(z, ACT: tl.constexpr):
    """float32; ACT is an ``ops.activation.ActivationCode``. The numbers are spelled out, for Inductor copies this function without its module."""
    if ACT == 1:
        return z * tl.sigmoid(z)
    elif ACT == 2:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == 3:  # 0.5 z (1 + tanh u) = z sigmoid(2 u)
        return z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    elif ACT == 4:
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACT == 0, "ACT is no ActivationCode")
        return z


@triton.jit
def linear_glu_gemv(
    X, QDATA, SCALE, GLOBAL_SCALE, BIAS, Y, M, N, K8, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, CVT: tl.constexpr,
    ASM: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE_STEP: tl.constexpr,
):  # fmt: skip
    words = QDATA.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    K = K8 * 8
    row0 = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    both = tl.arange(0, 2 * BLOCK_N)
    inside = first + both % BLOCK_N < N
    rn = (first + both % BLOCK_N + (both // BLOCK_N) * N).to(tl.int64)
    acc = tl.zeros((2 * BLOCK_N, BLOCK_W // 2), tl.float32)
    for k in range(0, K8, BLOCK_W):
        kw = k + tl.arange(0, BLOCK_W)
        ks = k // 2 + tl.arange(0, BLOCK_W // 2)
        if EVEN:
            w = tl.load(words + rn[:, None] * K8 + kw[None, :], eviction_policy="evict_first")
            s = tl.load(scales + rn[:, None] * (K8 // 2) + ks[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(words + rn[:, None] * K8 + kw[None, :], mask=inside[:, None] & (kw < K8)[None, :], other=0, eviction_policy="evict_first")
            s = tl.load(scales + rn[:, None] * (K8 // 2) + ks[None, :], mask=inside[:, None] & (ks < K8 // 2)[None, :], other=0, eviction_policy="evict_first")
        h0, h1, h2, h3 = decode8(w, CVT)
        acc += partial_sums(X, row0, M, k * 8, K, h0, h1, h2, h3, e4m3_to_f32(s), 2 * BLOCK_N, BLOCK_W, EVEN, CVT, ASM)
    z = tl.sum(acc, 1) * tl.load(GLOBAL_SCALE + both // BLOCK_N * SCALE_STEP)
    if HAS_BIAS:
        z += tl.load(BIAS + rn, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.trans(tl.reshape(z, (2, BLOCK_N))))
    idx_m = row0 + tl.arange(0, BLOCK_M)[:, None]
    idx_n = first + tl.arange(0, BLOCK_N)[None, :]
    y = (activate(gate, ACT) * up)[None, :]
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
