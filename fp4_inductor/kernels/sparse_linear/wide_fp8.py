"""cuda_sparse_wide_fp8: hundreds to thousands of rows on sparse FP8 tensor cores, without a temporary weight (``csrc/sparse/sparse_linear_wide_fp8.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import BF16, FP8, MEASURED, SPLITS, Kernel, On
from ..linear.wide_fp8 import TILE

LIBRARY = Library("sparse/sparse_linear_wide_fp8.cu", ("values", "meta", "scale"), TILE, None, early=True, activations=("x8", "x_scale"), siblings=True)
_WHY = (
    "kept codes rounded to E4M3 in registers for sparse FP8 wgmma, no temporary weight: products alone at N = K = 8192 31 us for M = "
    "256, 358 for 4096, dense weights 35 and 476"
)
KERNELS = (Kernel("sparse_linear", "cuda_sparse_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WHY),), BF16, FP8, 256, batch=SPLITS, form=LIBRARY),)
