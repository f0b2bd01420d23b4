"""fp4.linear_w4a4 without FP4 tensor cores: both operands are dequantized, the library multiplies."""

from __future__ import annotations

from torch import Tensor

from ...ops import linear_w4a4 as contract
from ..forms import Composed, Problem
from ..kernel import ANY, RIGHT, Kernel, On
from ..linear.rounded import EMULATED_W4A4
from ..linear.temporary import of_rows


def product(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    (x_qdata, x_scale, row_scale), (qdata, scale, global_scale) = activations, weight
    return contract.dequantized(x_qdata, x_scale, row_scale, qdata, scale, of_rows(global_scale, p.bounds, p.n), bias, p.dtype)


KERNELS = (
    Kernel(
        "linear_w4a4", "dequantize both + mm", "large_dense", (On(80, 129, RIGHT, EMULATED_W4A4),), ANY, batch=(1, "not examined"), form=Composed(product)
    ),
)  # fmt: skip
