"""One row: a bandwidth-bound GEMV on E4M3 weights, read as bytes so that sm_80 can run it; float32 sums."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import store_output


@triton.jit
def decode_e4m3(byte, CVT: tl.constexpr):
    """E4M3 bytes (uint8) -> float32, times 2**-8 without CVT; subnormals included, no NaN among weights."""
    if CVT:
        half = tl.inline_asm_elementwise(
            "{ .reg .b16 l, u; mov.b32 {l, u}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, u; }",
            "=r,=r,r",
            [byte],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        code = byte.to(tl.int16)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def linear_fp8_gemv(
    X, WEIGHT, WEIGHT_SCALE, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CVT: tl.constexpr
):  # fmt: skip
    bytes_ = WEIGHT.to(tl.pointer_type(tl.uint8), bitcast=True)
    row0 = tl.program_id(1).to(tl.int64)
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = rn.to(tl.int64)[:, None] * K
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        kx = k + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(bytes_ + row + kx[None, :], eviction_policy="evict_first")
            x = tl.load(X + row0 * K + kx)
        else:
            w = tl.load(bytes_ + row + kx[None, :], mask=(rn < N)[:, None] & (kx < K)[None, :], other=0, eviction_policy="evict_first")
            x = tl.load(X + row0 * K + kx, mask=kx < K, other=0.0)
        acc += decode_e4m3(w, CVT) * x.to(tl.float32)[None, :]
    idx_m = row0 + tl.arange(0, BLOCK_M)[:, None]
    idx_n = rn[None, :]
    unit = tl.load(WEIGHT_SCALE + rn, mask=rn < N, other=0.0) * (1.0 if CVT else 256.0)
    y = (tl.sum(acc, 1) * unit)[None, :]
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
