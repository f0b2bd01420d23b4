"""Both operands NVFP4: block-scaled FP4 MMA takes codes and E4M3 scales as they are. tcgen05 on sm_100, mma.sync on sm_120.

Rows past M and N are read again from the last one and not stored, so that only K has a tail. Where K is whole tiles, row
pitches are written as multiples of a tile's: the compiler sees their alignment and copies scales, too, asynchronously.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_mid import tile_of
from ..triton_common import e2m1_to_f16, e4m3_to_f32, global_scale_of, store_output


@triton.jit
def block_values(q, s, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes ``[ROWS, BLOCK_K / 2]`` and E4M3 bytes -> float32 ``[ROWS, BLOCK_K]``."""
    code = q.to(tl.int16)
    lo = e2m1_to_f16(code).to(tl.float32) * 16384.0  # 2**14
    hi = e2m1_to_f16(code >> 4).to(tl.float32) * 16384.0
    values = tl.reshape(tl.join(lo, hi), (ROWS, BLOCK_K // 16, 16)) * e4m3_to_f32(s)[:, :, None]
    return tl.reshape(values, (ROWS, BLOCK_K))


@triton.jit
def linear_w4a4(
    X, X_SCALE, ROW_SCALE, QDATA, SCALE, GLOBAL_SCALE, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    GROUP_N: tl.constexpr, NATIVE: tl.constexpr, B1: tl.constexpr = 0, B2: tl.constexpr = 0,
):  # fmt: skip
    x_scales = X_SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_m = tl.minimum(rm, M - 1).to(tl.int64)[:, None]
    row_n = tl.minimum(rn, N - 1).to(tl.int64)[:, None]
    bytes_k = K // BLOCK_K * (BLOCK_K // 2) if EVEN else K // 2
    blocks_k = K // BLOCK_K * (BLOCK_K // 16) if EVEN else K // 16
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        kb = k // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        ks = k // 16 + tl.arange(0, BLOCK_K // 16)[None, :]
        if EVEN:
            x = tl.load(X + row_m * bytes_k + kb)
            xs = tl.load(x_scales + row_m * blocks_k + ks)
            q = tl.load(QDATA + row_n * bytes_k + kb)
            s = tl.load(scales + row_n * blocks_k + ks)
        else:
            x = tl.load(X + row_m * bytes_k + kb, mask=kb < bytes_k, other=0)
            xs = tl.load(x_scales + row_m * blocks_k + ks, mask=ks < blocks_k, other=0)
            q = tl.load(QDATA + row_n * bytes_k + kb, mask=kb < bytes_k, other=0)
            s = tl.load(scales + row_n * blocks_k + ks, mask=ks < blocks_k, other=0)
        if NATIVE:
            xs8 = xs.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(x, xs8, "e2m1", tl.trans(q), s.to(tl.float8e4nv, bitcast=True), "e2m1", acc)
        else:  # Triton's interpreter takes E4M3 scales for exponents
            acc = tl.dot(block_values(x, xs, BLOCK_M, BLOCK_K), tl.trans(block_values(q, s, BLOCK_N, BLOCK_K)), acc, input_precision="ieee")
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    unit = tl.load(ROW_SCALE + row_m) * global_scale_of(GLOBAL_SCALE, idx_n, B1, B2)
    y = acc * unit
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
