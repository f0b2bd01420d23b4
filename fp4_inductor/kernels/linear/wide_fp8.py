"""cuda_wide_fp8: hundreds to thousands of rows on FP8 tensor cores, without a temporary weight (``csrc/gemm/linear_wide_fp8.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import BF16, FP8, MEASURED, SPLITS, Kernel, On

# A tile is ``tokens`` a block. ``splits`` clusters share a tile's K; 0: clusters take equal shares of all tiles' steps.
TILE = ("tokens", "splits")
_WHY = (
    "rounds weights to E4M3 in registers for FP8 wgmma, no temporary weight: at N = K = 8192 33 us for M = 256, 404 for 4096, where "
    "the temporary weight's path takes 58 and 471"
)
LIBRARY = Library("gemm/linear_wide_fp8.cu", ("qdata", "scale"), TILE, None, early=True, activations=("x8", "x_scale"), lane_order=True, siblings=True)
KERNELS = (Kernel("linear", "cuda_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WHY),), BF16, FP8, 256, 16, batch=SPLITS, form=LIBRARY),)
