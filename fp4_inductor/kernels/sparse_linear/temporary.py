"""Many rows of fp4.sparse_linear: a pass writes a temporary dense weight, FP8 or in the activations' dtype, and the library multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.dequantize_fp8 import scaled_product
from ...ops.sparse_dequantize import sparse_dequantize_rows
from ..forms import Composed, Problem
from ..kernel import ANY, BF16, BY_LIBRARY, COMPILED, FP8, MEASURED, RIGHT, Kernel, On
from ..linear.temporary import of_rows


def by_fp8(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """On FP8 tensor cores: a temporary E4M3 weight, activations rounded per token."""
    (x8, x_scale), (values, meta, scale, global_scale) = activations, weight
    return scaled_product(x8, x_scale, torch.ops.fp4.sparse_dequantize_fp8(values, meta, scale), of_rows(global_scale, p.bounds, p.n), p.dtype, bias)


def dense(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """Through a temporary weight in the activations' dtype."""
    (x,), (values, meta, scale, global_scale) = activations, weight
    dequantize = sparse_dequantize_rows if p.bounds else torch.ops.fp4.sparse_dequantize
    return torch.nn.functional.linear(x, dequantize(values, meta, scale, of_rows(global_scale, p.bounds, p.n), p.dtype), bias)


_FP8 = "as the dense FP8 path, the temporary weight written from 3.5 bits instead of 4.5"
_FP8_90 = f"{_FP8}, in 0.83 to 0.93 of its time: 524 us at N = K = 8192, M = 4096, bf16 cuBLAS 753"
_DENSE = "as dense: a temporary weight, then the library's GEMM"
KERNELS = (
    Kernel(
        "sparse_linear", "sparse_dequantize_fp8 + scaled_mm", "large_fp8",
        (On(90, 90, MEASURED, _FP8_90), On(89, 89, COMPILED, _FP8), On(100, 129, COMPILED, _FP8)), BF16, FP8, 32, 16, batch=BY_LIBRARY,
        form=Composed(by_fp8, "fp8"),
    ),
    Kernel("sparse_linear", "sparse_dequantize + mm", "large_dense", (On(80, 129, RIGHT, _DENSE),), ANY, batch=BY_LIBRARY, form=Composed(dense)),
)  # fmt: skip
