"""Many rows of fp4.linear: a pass writes a temporary weight, FP8 or in the activations' dtype, and the library multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.dequantize import dequantize_rows
from ...ops.dequantize_fp8 import fp8_product
from ...ops.members import row_scales
from ..forms import Composed, Problem
from ..kernel import ANY, BF16, BY_LIBRARY, COMPILED, FP8, MEASURED, Kernel, On


def of_rows(global_scale: Tensor, bounds: tuple[int, ...], n: int) -> Tensor:
    """``[n]``, or the one scale that all rows have."""
    return row_scales(global_scale, (0, *bounds), n) if bounds else global_scale


def by_fp8(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """On FP8 tensor cores: a temporary E4M3 weight, activations rounded per token."""
    (x8, x_scale), (qdata, scale, global_scale) = activations, weight
    return fp8_product(x8, x_scale, qdata, scale, of_rows(global_scale, p.bounds, p.n), p.dtype, bias)


def dense(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """Through a temporary weight in the activations' dtype."""
    (x,), (qdata, scale, global_scale) = activations, weight
    dequantize = dequantize_rows if p.bounds else torch.ops.fp4.dequantize
    return torch.nn.functional.linear(x, dequantize(qdata, scale, of_rows(global_scale, p.bounds, p.n), p.dtype), bias)


_FP8 = "FP8 tensor cores; the temporary weight costs one pass, and rowwise scaled_mm writes bfloat16"
_DENSE = "writes a temporary weight in the activation's dtype, then calls the library's GEMM"
KERNELS = (
    Kernel(
        "linear", "dequantize_fp8 + scaled_mm", "large_fp8", (On(90, 90, MEASURED, _FP8), On(89, 89, COMPILED, _FP8), On(100, 129, COMPILED, _FP8)),
        BF16, FP8, 16, 16, batch=BY_LIBRARY, form=Composed(by_fp8, "fp8"),
    ),
    Kernel("linear", "dequantize + mm", "large_dense", (On(80, 129, MEASURED, _DENSE),), ANY, batch=BY_LIBRARY, form=Composed(dense)),
)  # fmt: skip
