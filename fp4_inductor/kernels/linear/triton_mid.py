"""A few to a few hundred rows: decode to the activation's dtype in registers, multiply on the tensor cores.

The weight is the left operand (its N is the MMA's M), so few activations waste no tensor-core rows. e2m1 * e4m3 has six
significant bits, exact in float16 and in bfloat16; the global scale is applied to the float32 sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import e2m1_to_f16, e4m3_to_f32, global_scale_of, store_output


@triton.jit
def decode_bytes(q, scale, BF16: tl.constexpr, ASM: tl.constexpr):
    """uint8 ``[.., K/2]`` and 16-bit ``scale`` of the same shape -> low and high nibble's values, in ``scale``'s dtype.

    ``scale`` carries 2**118 (bfloat16) or 2**6 (float16), the decode 2**-126 or 2**-14: products are value * 2**-8, exact.
    """
    if ASM and BF16:
        lo, hi = tl.inline_asm_elementwise(
            """{ .reg .b32 v, t, s, n; mov.b32 n, 0x80008000;
            prmt.b32 v, $4, 0, 0x1404;
            shr.b32 t, v, 6; and.b32 t, t, 0x01C001C0; lop3.b32 s, v, 0x80008000, t, 0xEA; fma.rn.bf16x2 $2, s, $5, n;
            shr.b32 t, v, 2; and.b32 t, t, 0x01C001C0; shl.b32 v, v, 4; lop3.b32 s, v, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, s, $5, n;
            prmt.b32 v, $4, 0, 0x3424;
            shr.b32 t, v, 6; and.b32 t, t, 0x01C001C0; lop3.b32 s, v, 0x80008000, t, 0xEA; fma.rn.bf16x2 $3, s, $6, n;
            shr.b32 t, v, 2; and.b32 t, t, 0x01C001C0; shl.b32 v, v, 4; lop3.b32 s, v, 0x80008000, t, 0xEA; fma.rn.bf16x2 $1, s, $6, n; }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [q, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif ASM:
        lo, hi = tl.inline_asm_elementwise(
            """{ .reg .b32 v, t, s;
            prmt.b32 v, $4, 0, 0x1404;
            shr.b32 t, v, 3; and.b32 t, t, 0x0E000E00; lop3.b32 s, v, 0x80008000, t, 0xEA; mul.rn.f16x2 $2, s, $5;
            shl.b32 v, v, 4; shr.b32 t, v, 3; and.b32 t, t, 0x0E000E00; lop3.b32 s, v, 0x80008000, t, 0xEA; mul.rn.f16x2 $0, s, $5;
            prmt.b32 v, $4, 0, 0x3424;
            shr.b32 t, v, 3; and.b32 t, t, 0x0E000E00; lop3.b32 s, v, 0x80008000, t, 0xEA; mul.rn.f16x2 $3, s, $6;
            shl.b32 v, v, 4; shr.b32 t, v, 3; and.b32 t, t, 0x0E000E00; lop3.b32 s, v, 0x80008000, t, 0xEA; mul.rn.f16x2 $1, s, $6; }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [q, scale],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        code = q.to(tl.int16)
        lo = e2m1_to_f16(code).to(scale.dtype) * scale
        hi = e2m1_to_f16(code >> 4).to(scale.dtype) * scale
    return lo, hi


@triton.jit
def scale_of_bytes(s, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """E4M3 bytes ``[BLOCK_N, BLOCK_K / 16]`` -> ``[BLOCK_N, BLOCK_K / 2]`` in DTYPE, one per byte of codes, as :func:`decode_bytes` takes them."""
    # 2**118 or 2**6. Interpreted, the bfloat16 decode is float16's: 2**-14.
    s16 = (e4m3_to_f32(s) * (3.32306998946229e35 if BF16 and ASM else 64.0)).to(DTYPE)
    return tl.reshape(tl.broadcast_to(s16[:, :, None], (BLOCK_N, BLOCK_K // 16, 8)), (BLOCK_N, BLOCK_K // 2))


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr):
    """The tile ``(m, n)`` of a program: GROUP_N column blocks share their activations in L2 before the next rows start."""
    grid_n = tl.cdiv(N, BLOCK_N)
    grid_m = tl.cdiv(M, BLOCK_M)
    width = GROUP_N * grid_m
    first_n = (pid // width) * GROUP_N
    size_n = tl.minimum(grid_n - first_n, GROUP_N)
    return (pid % width) // size_n, first_n + (pid % width) % size_n


@triton.jit
def linear_mid(
    X, QDATA, SCALE, GLOBAL_SCALE, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GROUP_N: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    B1: tl.constexpr = 0, B2: tl.constexpr = 0,
):  # fmt: skip
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_N)
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
        s16 = scale_of_bytes(s, x.dtype, BLOCK_N, BLOCK_K, BF16, ASM)
        lo, hi = decode_bytes(q, s16, BF16, ASM)
        acc = tl.dot(tl.reshape(tl.join(lo, hi), (BLOCK_N, BLOCK_K)), tl.trans(x), acc)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    y = tl.trans(acc) * (global_scale_of(GLOBAL_SCALE, idx_n, B1, B2) * 256.0)
    mask = (idx_m < M) & (idx_n < N)
    store_output(Y, idx_m, idx_n, y, mask, N)
