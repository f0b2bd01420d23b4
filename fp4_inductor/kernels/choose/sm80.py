"""The choice on sm_80 to sm_89: Ampere and Ada, where the kernels are compiled and nobody has timed them."""

from __future__ import annotations

from .common import assignments, first, many_assignments, many_rows


def linear(call, can):
    # sm_80 to sm_88 have no FP8 tensor cores to hand over to.
    yield from few_rows(call, can, gemv=2, mid=64 if call.arch == 89 else 256)
    yield from many_rows(call, can)


def few_rows(call, can, gemv, mid):
    """fp4.linear up to some dozens of rows; ``gemv``, ``mid``: up to how many the two Triton kernels serve."""
    if can("cuda_gemv"):
        yield 1, "cuda_gemv"
    if can("triton_gemv"):
        yield 1, "triton_gemv"  # bound by memory, and epilogues fuse behind it
        if not can("cuda_small"):
            yield gemv, "triton_gemv"  # no CUDA kernel takes the call
    if can("cuda_small"):
        yield 16, "cuda_small"
    if can("triton_mid"):
        yield mid, "triton_mid"


def linear_glu(call, can):
    yield from fused(can, "cuda_small_glu", "linear, then act * up", ("cuda_gemv_glu", "triton_gemv_glu"))


def linear_epilogue(call, can):
    yield from fused(can, "cuda_small_pointwise", "linear, then pointwise", ("cuda_gemv_pointwise",))


def fused(can, small, apart, gemvs):
    """``small`` for 2 to 16 rows, if it is switched on; one row is the first of ``gemvs`` that is, else the GEMV's, which fuses what is behind it."""
    for gemv in gemvs:
        if can(gemv):
            yield 1, gemv
    if can(small):
        yield 1, apart
        yield 16, small
    yield from first(can, apart)


def sparse_linear(call, can):
    if can("triton_sparse_gemv"):
        yield 1, "triton_sparse_gemv"
    if can("cuda_sparse_small"):
        yield 16, "cuda_sparse_small"
    if can("triton_sparse_mid"):
        yield 64, "triton_sparse_mid"
    yield from first(can, "sparse_dequantize_fp8 + scaled_mm", "sparse_dequantize + mm")


def moe(call, can):
    if can("triton_moe_decode"):
        yield assignments(call, 4, 3.0), "triton_moe_decode"  # two launches, nothing sorted
    if can("triton_moe_grouped"):
        yield assignments(call, 64, 32.0), "triton_moe_grouped"
    yield from many_assignments(call, can)


def sparse_moe(call, can):
    if can("triton_sparse_moe_decode"):
        yield assignments(call, 4, 3.0), "triton_sparse_moe_decode"
    if can("triton_sparse_moe_grouped"):
        yield assignments(call, 64, 32.0), "triton_sparse_moe_grouped"
    yield from many_assignments(call, can, sparse=True)
