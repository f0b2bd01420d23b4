"""cuda_small: up to 32 rows, packed weights straight into mma.sync (``csrc/gemm/linear_small.cu``); alone, or with an epilogue."""

from __future__ import annotations

from ..forms import Library
from ..kernel import COMPILED, EMULATED, MEASURED, Kernel, On
from .finishes import GLU_SUMS, POINTWISE_SUMS, finishes

# A tile is 16 * rows_16 rows of the weight a block, K is split over warps.
_TILE = ("rows_16", "warps", "stages")
_WARPS = (16, "K is split over other numbers of warps for M <= 16 than above, unless 8192 <= N <= 8448 or N < 8192 <= K")
_WHY = "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8 on an H200, bf16 cuBLAS 34; three siblings take the time of one layer"
_WHY_90 = (
    "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8, bf16 cuBLAS 34; cuda_table (K % 256 = 0, M <= 32) "
    "and cuda_wide (from 2^24 weights on) are faster"
)
_ANY_K = "cuda_small with narrower copies, for K that is only a multiple of 16: 20.2 us at N = 8192, K = 8208, M = 1, where the GEMV takes 26.6"
_FUSED = {
    "pointwise": f"{POINTWISE_SUMS}: with a residual 17.3 us at N = K = 8192, M = 2, in two kernels 18.9; but 34.1 and 32.8 at M = 32",
    "glu": f"{GLU_SUMS}: 7.3 us at N = K = 4096, M = 2, where the matmul alone takes 6.7 and eager steps 12.4",
}


def _most_rows(arch: int) -> int:
    return 32 if arch == 90 else 16


def _library(finish: str) -> Library:
    return Library("gemm/linear_small.cu", ("qdata", "scale"), _TILE, finish, most_rows=_most_rows)


KERNELS = (
    Kernel(
        "linear", "cuda_small", "small", (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        k_multiple=64, batch=_WARPS, form=_library("plain"),
    ),
    Kernel("linear", "cuda_small_any_k", "small", (On(90, 90, MEASURED, _ANY_K),), batch=_WARPS, form=_library("plain")),
    *(
        Kernel(
            op, f"cuda_small_{finish}", "small", (On(90, 90, MEASURED, _FUSED[finish]), On(80, 89, EMULATED, saves), On(100, 129, EMULATED, saves)),
            k_multiple=64, batch=_WARPS, form=_library(finish),
        )
        for op, finish, saves in finishes()
    ),
)  # fmt: skip
