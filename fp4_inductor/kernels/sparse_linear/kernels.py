"""The kernels of fp4.sparse_linear, 2:4-sparse NVFP4 weights."""

from __future__ import annotations

from ..kernel import ANY, BF16, COMPILED, IN_CI, MEASURED, RIGHT, Kernel, On
from ..linear.kernels import CPU_ROWS, FP8, LIBRARY, SPLITS

_GEMV = "reads kept codes and gathers their activations: 22% fewer bytes than dense weights"
_GEMV_90 = (
    "reads kept codes, 22% fewer bytes, and gathers activations: 5.4 us at N = K = 4096, where cuda_sparse_small takes 6.3, but 20.1 for 16.1 at N = K = 8192"
)
_TABLE = "cuda_table's decoding on kept codes, for mma.sp: 9.7 us at N = K = 8192, M = 1 with PDL, where cuda_table takes 12.1; 11.7 for 13.8 without"
_SMALL_90 = "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: 16.1 us at N = K = 8192, M = 1 to 8, where the Triton kernel takes 57 to 60 and bf16 cuBLAS 35"
_SMALL = "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: a third of the Triton kernel's time on an H200; neither has run here"
_WIDE = "kept codes decoded in registers for sparse wgmma: half the decoding and products of cuda_wide; at N = K = 8192 19.2 us for M = 64, dense 21.6, and 39.9 for M = 256, with a temporary weight 63"
_MID = "the dense mid kernel on codes decompressed in registers: 1.3-1.5x its instructions, 22% fewer bytes"
_MID_90 = f"{_MID}: 101 us at N = K = 8192, M = 64, dense weights 70, bf16 cuBLAS 38"
_WIDE_FP8 = "kept codes rounded to E4M3 in registers for sparse FP8 wgmma, no temporary weight: products alone at N = K = 8192 31 us for M = 256, 358 for 4096, dense weights 35 and 476"
_FP8 = "as the dense FP8 path, the temporary weight written from 3.5 bits instead of 4.5"
_FP8_90 = f"{_FP8}, in 0.83 to 0.93 of its time: 524 us at N = K = 8192, M = 4096, bf16 cuBLAS 753"
_DENSE = "as dense: a temporary weight, then the library's GEMM"
KERNELS = (
    Kernel("sparse_linear", "cpu", "cpu", (On(0, 0, IN_CI, "C kernel: GEMV on the kept weights for M <= 8, else as dense"),), ANY, batch=CPU_ROWS),
    Kernel("sparse_linear", "triton_sparse_gemv", "gemv", (On(90, 90, MEASURED, _GEMV_90), On(80, 89, COMPILED, _GEMV), On(100, 129, COMPILED, _GEMV))),
    Kernel("sparse_linear", "cuda_sparse_table", "small", (On(90, 90, MEASURED, _TABLE),), k_multiple=256, least_n=16, csrc="sparse_linear_table", batch=(16, "")),
    Kernel(
        "sparse_linear", "cuda_sparse_small", "small", (On(90, 90, MEASURED, _SMALL_90), On(80, 89, COMPILED, _SMALL), On(100, 129, COMPILED, _SMALL)),
        k_multiple=32, csrc="sparse_linear_small", batch=SPLITS,
    ),
    Kernel("sparse_linear", "cuda_sparse_wide", "wide", (On(90, 90, MEASURED, _WIDE),), k_multiple=256, csrc="sparse_linear_wide", batch=SPLITS),
    Kernel(
        "sparse_linear", "triton_sparse_mid", "mid", (On(90, 90, MEASURED, _MID_90), On(80, 89, COMPILED, _MID), On(100, 129, COMPILED, _MID)),
        batch=(1, "the tile follows M; a graph with dynamic M keeps one"), tile_by_bound=True,
    ),
    Kernel(
        "sparse_linear", "cuda_sparse_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WIDE_FP8),), BF16, FP8, 256, csrc="sparse_linear_wide_fp8", batch=SPLITS
    ),
    Kernel(
        "sparse_linear", "sparse_dequantize_fp8 + scaled_mm", "large_fp8",
        (On(90, 90, MEASURED, _FP8_90), On(89, 89, COMPILED, _FP8), On(100, 129, COMPILED, _FP8)), BF16, FP8, 32, 16, batch=LIBRARY,
    ),
    Kernel("sparse_linear", "sparse_dequantize + mm", "large_dense", (On(80, 129, RIGHT, _DENSE),), ANY, batch=LIBRARY),
)  # fmt: skip
