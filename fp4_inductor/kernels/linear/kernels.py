"""The kernels of fp4.linear, fp4.linear_epilogue and fp4.linear_glu (both: the sums of fp4.linear with more behind them)."""

from __future__ import annotations

from ..kernel import ANY, BF16, COMPILED, EMULATED, IN_CI, MEASURED, RIGHT, Kernel, On

# Why results depend on how many rows share a call.
LIBRARY = (1, "the library chooses its algorithm by M")
SPLITS = (1, "the tile and the number of blocks that share K follow M")
CPU_ROWS = (8, "up to 8 rows are summed in another order than more")
_WARPS = (16, "K is split over other numbers of warps for M <= 16 than above, unless 8192 <= N <= 8448 or N < 8192 <= K")
_SEVEN = (16, "for more than 16 rows seven warps share K in place of eight where 6337 <= N <= 8448 and K >= 2048")

_GEMV = "bound by memory: dot products on packed words take 1.1-1.3x the time of reading the weight at M = 1; epilogues fuse behind it"
_GEMV_90 = "dot products on packed words; an 8B model's step on an H100 takes 69 us a layer, with cuda_table and PDL 75 (on an H200 65.7 and 64.6)"
_TABLE = "decodes by a table in shared memory: 14.4 us at N = K = 8192, M = 8, and 15.3 at M = 16, where cuda_small takes 17.3 and 24.7"
_SMALL = "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8 on an H200, bf16 cuBLAS 34; three siblings take the time of one layer"
_SMALL_90 = "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8, bf16 cuBLAS 34; cuda_table (K % 256 = 0, M <= 24) and cuda_wide (from 2^24 weights on) are faster"
_ANY_K = "cuda_small with narrower copies, for K that is only a multiple of 16: 20.2 us at N = 8192, K = 8208, M = 1, where the GEMV takes 26.6"
_WIDE = "decodes each weight once for all rows, in registers, as wgmma's operand: at N = K = 8192 18 us for M = 32, 22 for 64, 31 for 128, bf16 cuBLAS 35 to 38"
_WIDE_FP8 = "rounds weights to E4M3 in registers for FP8 wgmma, no temporary weight: at N = K = 8192 33 us for M = 256, 404 for 4096, where the temporary weight's path takes 58 and 471"
_MID = "decodes in registers for tensor cores; above M = 64 one pass that writes a temporary FP8 weight costs less"
_MID_80 = "as on sm_90, but there are no FP8 tensor cores to hand over to"
_W4A4 = (
    "activations are rounded to NVFP4 per token; pays where bf16 products, not weight bytes, are the limit: by data sheet above M = 33 (RTX 5090) to 79 (B200)"
)
EMULATED_W4A4 = (
    "no FP4 tensor cores: activations are rounded as there, then both operands multiplied in high precision; the same numbers, slower than not rounding"
)
_FP8 = "FP8 tensor cores; the temporary weight costs one pass, and rowwise scaled_mm writes bfloat16"
FP8 = ("auto", "fp8")


def _fused(op: str, finish: str, why: str, small: str, wide: str) -> tuple[Kernel, ...]:
    """The CUDA kernels with an epilogue, where ``why`` is what all of them save, and ``small``, ``wide`` were measured."""
    elsewhere = On(80, 89, EMULATED, why), On(100, 129, EMULATED, why)
    table = On(90, 90, MEASURED, f"{why}; timed in a whole model only (cuda_table alone: 14.4 us at N = K = 8192, M = 8)")
    mma, wgmma = On(90, 90, MEASURED, small), On(90, 90, MEASURED, wide)
    return (
        Kernel(op, f"cuda_table_{finish}", "small", (table,), k_multiple=256, csrc=f"linear_table_{finish}", batch=_SEVEN),
        Kernel(op, f"cuda_small_{finish}", "small", (mma, *elsewhere), k_multiple=64, csrc=f"linear_small_{finish}", batch=_WARPS),
        Kernel(op, f"cuda_wide_{finish}", "wide", (wgmma,), k_multiple=64, csrc=f"linear_wide_{finish}", batch=SPLITS),
    )


_THEN_SUMS, _PAIRED_SUMS = "act(x W + bias) * mul + residual on the float32 sums", "act(gate) * up on the float32 sums of both"
_THEN = f"{_THEN_SUMS}: Inductor cannot fuse a pointwise kernel behind an operator"
_THEN_SMALL = f"{_THEN_SUMS}: with a residual 17.3 us at N = K = 8192, M = 2, in two kernels 18.9; but 34.1 and 32.8 at M = 32"
_THEN_WIDE = f"{_THEN_SUMS}: with a residual 24.5 us at N = K = 8192, M = 64, in two kernels 24.9"
_PAIRED = f"{_PAIRED_SUMS}: half the stores, and no pointwise kernel behind it"
_PAIRED_SMALL = f"{_PAIRED_SUMS}: 7.3 us at N = K = 4096, M = 2, where the matmul alone takes 6.7 and eager steps 12.4"
_PAIRED_WIDE = f"{_PAIRED_SUMS}: 24.4 us at N = K = 8192, M = 64, where the matmul alone takes 22.6"
FUSED_GLU = _fused("linear_glu", "glu", _PAIRED, _PAIRED_SMALL, _PAIRED_WIDE)

KERNELS = (
    Kernel("linear", "cpu", "cpu", (On(0, 0, IN_CI, "C kernel: GEMV for M <= 8, else decode a cached block and multiply; dispatches itself"),), ANY, batch=CPU_ROWS),
    Kernel(
        "linear", "triton_gemv", "gemv", (On(90, 90, MEASURED, _GEMV_90), On(80, 89, COMPILED, _GEMV), On(100, 129, COMPILED, _GEMV)),
        batch=(1, "one row is summed in other pieces than 2 to 4"), tile_by_bound=True,
    ),
    Kernel("linear", "cuda_table", "small", (On(90, 90, MEASURED, _TABLE),), k_multiple=256, csrc="linear_table", batch=_SEVEN),
    Kernel(
        "linear", "cuda_small", "small", (On(90, 90, MEASURED, _SMALL_90), On(80, 89, COMPILED, _SMALL), On(100, 129, COMPILED, _SMALL)),
        k_multiple=64, csrc="linear_small", batch=_WARPS,
    ),
    Kernel("linear", "cuda_small_any_k", "small", (On(90, 90, MEASURED, _ANY_K),), csrc="linear_small", batch=_WARPS),
    Kernel("linear", "cuda_wide", "wide", (On(90, 90, MEASURED, _WIDE),), k_multiple=64, csrc="linear_wide", batch=SPLITS),
    Kernel(
        "linear", "triton_mid", "mid",
        (On(90, 90, MEASURED, _MID), On(80, 88, COMPILED, _MID_80), On(89, 89, COMPILED, _MID), On(100, 129, COMPILED, _MID)),
        batch=(1, "the tile follows M; a graph with dynamic M keeps one"), tile_by_bound=True,
    ),
    Kernel(
        "linear", "quantize_rows_nvfp4 + linear_w4a4", "large_nvfp4",
        (On(0, 0, IN_CI, EMULATED_W4A4), On(80, 99, RIGHT, EMULATED_W4A4), On(100, 129, COMPILED, _W4A4)),
        ANY, ("nvfp4",), batch=(1, "not examined"),
    ),
    Kernel(
        "linear", "cuda_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WIDE_FP8),), BF16, FP8, 256, 16, csrc="linear_wide_fp8", batch=SPLITS
    ),
    Kernel(
        "linear", "dequantize_fp8 + scaled_mm", "large_fp8", (On(90, 90, MEASURED, _FP8), On(89, 89, COMPILED, _FP8), On(100, 129, COMPILED, _FP8)),
        BF16, FP8, 16, 16, batch=LIBRARY,
    ),
    Kernel(
        "linear", "dequantize + mm", "large_dense",
        (On(80, 129, MEASURED, "writes a temporary weight in the activation's dtype, then calls the library's GEMM"),), ANY, batch=LIBRARY,
    ),
    *_fused("linear_epilogue", "pointwise", _THEN, _THEN_SMALL, _THEN_WIDE),
    Kernel(
        "linear_epilogue", "linear, then pointwise", "unfused", (On(0, 129, IN_CI, "fp4.linear by its own kernels; Inductor fuses the rest"),), ANY
    ),
)  # fmt: skip
