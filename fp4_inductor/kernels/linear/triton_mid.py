"""A few to a few hundred rows: decode to the activation's dtype in registers, multiply on the tensor cores.

The weight is the left operand (its N is the MMA's M), so few activations waste no tensor-core rows. e2m1 * e4m3 has six
significant bits, exact in float16 and in bfloat16; the global scale is applied to the float32 sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e2m1_to_f16, e4m3_to_f32, store_output


@triton.jit
def linear_mid(
    X, QDATA, SCALE, GLOBAL_SCALE, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GROUP_N: tl.constexpr
):  # fmt: skip
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    grid_n = tl.cdiv(N, BLOCK_N)
    grid_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    # GROUP_N column blocks share their activations in L2 before the next rows start
    width = GROUP_N * grid_m
    first_n = (pid // width) * GROUP_N
    size_n = tl.minimum(grid_n - first_n, GROUP_N)
    pid_n = first_n + (pid % width) % size_n
    pid_m = (pid % width) // size_n
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = rn.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        kb = k // 2 + tl.arange(0, BLOCK_K // 2)
        ks = k // 16 + tl.arange(0, BLOCK_K // 16)
        kx = k + tl.arange(0, BLOCK_K)
        if EVEN:
            q = tl.load(QDATA + row * (K // 2) + kb[None, :])
            s = tl.load(scales + row * (K // 16) + ks[None, :])
            x = tl.load(X + rm.to(tl.int64)[:, None] * K + kx[None, :], mask=(rm < M)[:, None], other=0.0)
        else:
            q = tl.load(QDATA + row * (K // 2) + kb[None, :], mask=(rn < N)[:, None] & (kb < K // 2)[None, :], other=0)
            s = tl.load(scales + row * (K // 16) + ks[None, :], mask=(rn < N)[:, None] & (ks < K // 16)[None, :], other=0)
            x = tl.load(X + rm.to(tl.int64)[:, None] * K + kx[None, :], mask=(rm < M)[:, None] & (kx < K)[None, :], other=0.0)
        code = q.to(tl.int16)
        pair = tl.join(e2m1_to_f16(code), e2m1_to_f16(code >> 4))
        # value * 2**-14 times scale * 2**6: at least 2**-18 and at most 12, exact in both 16-bit formats
        w = tl.reshape(pair, (BLOCK_N, BLOCK_K // 16, 16)).to(x.dtype)
        w = w * (e4m3_to_f32(s) * 64.0).to(x.dtype)[:, :, None]
        acc = tl.dot(tl.reshape(w, (BLOCK_N, BLOCK_K)), tl.trans(x), acc)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    y = tl.trans(acc) * (tl.load(GLOBAL_SCALE) * 256.0)
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
