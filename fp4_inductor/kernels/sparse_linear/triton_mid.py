"""A few to a few hundred rows by a 2:4-sparse weight: the dense kernel of :mod:`..linear.triton_mid` on codes that are decompressed in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_mid import decode_bytes, scale_of_bytes, tile_of
from ..triton_common import decompressed, global_scale_of, store_output


@triton.jit
def sparse_mid(
    X, VALUES, META, SCALE, GLOBAL_SCALE, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GROUP_N: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    B1: tl.constexpr = 0, B2: tl.constexpr = 0,
):  # fmt: skip
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = rn.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        kv = k // 4 + tl.arange(0, BLOCK_K // 4)
        km = k // 8 + tl.arange(0, BLOCK_K // 8)
        ks = k // 16 + tl.arange(0, BLOCK_K // 16)
        kx = k + tl.arange(0, BLOCK_K)
        if EVEN:
            v = tl.load(VALUES + row * (K // 4) + kv[None, :])
            m = tl.load(META + row * (K // 8) + km[None, :])
            s = tl.load(scales + row * (K // 16) + ks[None, :])
            x = tl.load(X + rm.to(tl.int64)[:, None] * K + kx[None, :], mask=(rm < M)[:, None], other=0.0)
        else:
            v = tl.load(VALUES + row * (K // 4) + kv[None, :], mask=(rn < N)[:, None] & (kv < K // 4)[None, :], other=0)
            m = tl.load(META + row * (K // 8) + km[None, :], mask=(rn < N)[:, None] & (km < K // 8)[None, :], other=0)
            s = tl.load(scales + row * (K // 16) + ks[None, :], mask=(rn < N)[:, None] & (ks < K // 16)[None, :], other=0)
            x = tl.load(X + rm.to(tl.int64)[:, None] * K + kx[None, :], mask=(rm < M)[:, None] & (kx < K)[None, :], other=0.0)
        s16 = scale_of_bytes(s, x.dtype, BLOCK_N, BLOCK_K, BF16, ASM)
        lo, hi = decode_bytes(decompressed(v, m, BLOCK_N, BLOCK_K), s16, BF16, ASM)
        acc = tl.dot(tl.reshape(tl.join(lo, hi), (BLOCK_N, BLOCK_K)), tl.trans(x), acc)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    y = tl.trans(acc) * (global_scale_of(GLOBAL_SCALE, idx_n, B1, B2) * 256.0)
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
