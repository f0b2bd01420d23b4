"""The kernels of fp4.linear_fp8, a weight in E4M3 with a scale a row."""

from __future__ import annotations

from ..kernel import ANY, BF16, IN_CI, RIGHT, Kernel, On
from ..linear.kernels import FP8, LIBRARY

_CPU = "float32 products of cached blocks: saves memory, not time"
_CAST = "writes a temporary weight in the activation's dtype"
KERNELS = (
    Kernel("linear_fp8", "cpu", "cpu", (On(0, 0, IN_CI, _CPU),), ANY, k_multiple=1, batch=LIBRARY),
    Kernel("linear_fp8", "triton_gemv_fp8", "gemv", (On(80, 129, RIGHT, "bound by memory: half the bytes of bf16"),), k_multiple=1),
    Kernel(
        "linear_fp8", "scaled_mm", "large_fp8", (On(89, 129, RIGHT, "FP8 tensor cores; activations are rounded per row"),), BF16, FP8, 16, 16, batch=LIBRARY
    ),
    Kernel("linear_fp8", "cast + mm", "large_dense", (On(80, 129, RIGHT, _CAST),), ANY, k_multiple=1, batch=LIBRARY),
)
