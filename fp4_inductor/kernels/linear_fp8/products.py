"""Many rows of fp4.linear_fp8: on FP8 tensor cores, or through a temporary weight in the activations' dtype."""

from __future__ import annotations

from torch import Tensor

from ...ops import linear_fp8 as contract
from ...ops.dequantize_fp8 import rowwise_product
from ..forms import Composed, Problem
from ..kernel import ANY, BF16, BY_LIBRARY, FP8, RIGHT, Kernel, On


def scaled(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """Activations rounded to E4M3 per row, times the weight on FP8 tensor cores; the bias is added to the rounded result."""
    (x8, x_scale), (w, w_scale) = activations, weight
    return _plus(rowwise_product(x8, x_scale, w, w_scale.unsqueeze(0), p.dtype), bias)


def transient(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    return _plus(contract.transient(*activations, *weight), bias)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


_CAST = "writes a temporary weight in the activation's dtype"
KERNELS = (
    Kernel(
        "linear_fp8", "scaled_mm", "large_fp8", (On(89, 129, RIGHT, "FP8 tensor cores; activations are rounded per row"),), BF16, FP8, 16, 16,
        batch=BY_LIBRARY, form=Composed(scaled, "fp8"),
    ),
    Kernel("linear_fp8", "cast + mm", "large_dense", (On(80, 129, RIGHT, _CAST),), ANY, k_multiple=1, batch=BY_LIBRARY, form=Composed(transient)),
)  # fmt: skip
