"""The choice on sm_90: H100, H200. The figures behind it are in ``benchmarks/results`` and ``benchmarks/NOTES.md``."""

from __future__ import annotations

import torch

from .common import assignments, first, many_assignments, many_rows


def linear(call, can):
    if can("cuda_gemv") and not call.eager:
        # Ahead where it begins while the kernel before it runs. Where it may not, as in every eager call, triton_gemv takes 11 to 20% less time.
        yield 1, "cuda_gemv"
    smalls = can("cuda_table") or can("cuda_small") or can("cuda_small_any_k")
    if can("triton_gemv"):
        if call.k % 64 == 0:
            # A whole step of an 8B model takes 69 us a layer on an H100 with it, 75 with cuda_table and PDL. cuda_gemv is ahead of both.
            yield 1, "triton_gemv"
        if not smalls:
            yield 4, "triton_gemv"  # no CUDA kernel takes the call: still faster than padding the rows to a tensor-core tile
    if can("cuda_table"):
        yield 32, "cuda_table"  # a block keeps its sums in registers: four tiles of eight tokens fit
    elif can("cuda_small_any_k") and call.k % 64:
        yield 32, "cuda_small_any_k"
    elif can("cuda_small"):
        yield small_rows(call), "cuda_small"
    if can("cuda_wide"):
        yield wide_until(call, without_fp8=256), "cuda_wide"
    elif can("triton_mid"):
        yield 64, "triton_mid"
    if can("cuda_wide_fp8"):
        yield 8192, "cuda_wide_fp8"  # weights are rounded to E4M3 in registers; above, one pass that writes them costs less
    yield from many_rows(call, can)


def small_rows(call):
    """cuda_small's largest M, where cuda_table does not take K. cuda_wide brings scales by ordinary copies then, and was timed for wide weights only."""
    return 32 if call.weights < 2**24 or call.n < 8192 else 16


def wide_until(call, without_fp8):
    """cuda_wide's largest M. The larger the weight is, the earlier FP8 products are ahead, which follow it if they are allowed."""
    if call.prefill == "nvfp4":
        return 64
    if call.prefill == "bf16" or call.dtype == torch.float16:
        return without_fp8
    if call.k % 256 or call.weights < 2**25:
        return 128
    return 64 if call.weights <= 2**26 else 32


def linear_glu(call, can):
    yield from fused(call, can, "glu", "linear, then act * up", small=32)


def linear_epilogue(call, can):
    yield from fused(call, can, "pointwise", "linear, then pointwise", small=16)


def fused(call, can, finish, apart, small):
    """The kernels of fp4.linear with an epilogue. ``small``: cuda_small's largest M.

    One row that cuda_gemv does not take is triton_gemv's, behind which Inductor fuses the rest.
    """
    if finish == "glu" and can("triton_gemv_glu"):  # off, so somebody has asked for it
        yield 1, "triton_gemv_glu"
    if can(f"cuda_gemv_{finish}") and not call.eager:
        yield 1, f"cuda_gemv_{finish}"
    table, mma, wide = (f"cuda_{size}_{finish}" for size in ("table", "small", "wide"))
    if can(table) or can(mma) or can(wide):
        yield 1, apart
    if can(table):
        yield 32, table
    elif can(mma):
        yield small, mma
    if can(wide):
        yield wide_until(call, without_fp8=128), wide
    yield from first(can, apart)


def sparse_linear(call, can):
    table, small, wide = (f"cuda_sparse_{size}" for size in ("table", "small", "wide"))
    if can("triton_sparse_gemv") and (sparse_gemv_is_ahead(call) or not (can(table) or can(small))):
        yield 1, "triton_sparse_gemv"
    if can(table):
        yield 16, table
    if can(small):
        yield 16 if can(wide) else 32, small
    if can(wide):
        yield sparse_wide_until(call), wide
    elif can("triton_sparse_mid"):
        yield 64, "triton_sparse_mid"
    if can("cuda_sparse_wide_fp8"):
        yield 8192, "cuda_sparse_wide_fp8"
    yield from first(can, "sparse_dequantize_fp8 + scaled_mm", "sparse_dequantize + mm")


def sparse_gemv_is_ahead(call):
    """Of one row: for small weights; up to 2^26 where cuda_sparse_table does not take K."""
    return call.weights < (2**24 if call.k % 256 == 0 else 2**26)


def sparse_wide_until(call):
    """As wide_until; half the decoding and products, so it is ahead for longer."""
    if call.prefill in ("bf16", "nvfp4") or call.dtype == torch.float16:
        return 384
    return 256 if call.weights < 2**25 else 64 if call.weights <= 2**26 else 32


def moe(call, can):
    decode, table, wide = "triton_moe_decode", "cuda_moe_table", "cuda_moe_wide"
    # An expert of few weights leaves blocks of cuda_moe_table idle.
    by_table = can(table) and call.weights >= 8 * 10**6
    if can(decode):
        # Sorting pays from 0.6 assignments an expert on with cuda_moe_wide, from three without.
        if not (by_table and can(wide)):
            yield assignments(call, 4, 0.6 if can(wide) else 3.0), decode
        if 8 * 10**6 <= call.weights < 2**24:
            yield 8, decode
    if by_table:
        yield assignments(call, 16, 1.0), table
    if can(wide):
        most = 192 if call.prefill in ("bf16", "nvfp4") else 14 if call.k % 256 == 0 else 24
        yield assignments(call, most, most), wide
    elif can("triton_moe_grouped"):
        yield assignments(call, 64, 32.0), "triton_moe_grouped"
    if can("cuda_moe_wide_fp8"):
        yield 2**20, "cuda_moe_wide_fp8"
    yield from many_assignments(call, can)


def sparse_moe(call, can):
    if can("cuda_sparse_moe_table") and call.weights >= 2**24:
        yield assignments(call, 16, 3.0), "cuda_sparse_moe_table"
    elif can("triton_sparse_moe_decode"):
        yield assignments(call, 4, 3.0), "triton_sparse_moe_decode"
    if can("triton_sparse_moe_grouped"):
        yield assignments(call, 64, 32.0), "triton_sparse_moe_grouped"
    yield from many_assignments(call, can, sparse=True)
