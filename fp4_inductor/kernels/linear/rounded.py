"""prefill="nvfp4": activations are rounded to NVFP4 as well, and fp4.linear_w4a4 multiplies by its own choice of kernel."""

from __future__ import annotations

from torch import Tensor

from ...ops import linear_w4a4
from ..forms import Composed, Problem
from ..kernel import ANY, COMPILED, IN_CI, RIGHT, Kernel, On

EMULATED_W4A4 = (
    "no FP4 tensor cores: activations are rounded as there, then both operands multiplied in high precision; the same numbers, slower than not rounding"
)
_W4A4 = (
    "activations are rounded to NVFP4 per token; pays where bf16 products, not weight bytes, are the limit: by data sheet above M = 33 (RTX 5090) to 79 (B200)"
)


def product(activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """By fp4.linear_w4a4, a call for each global scale."""
    qdata, scale, global_scale = weight
    return linear_w4a4.by_members(activations, qdata, scale, global_scale, bias, p.dtype, (0, *p.bounds) if p.bounds else None)


KERNELS = (
    Kernel(
        "linear", "quantize_rows_nvfp4 + linear_w4a4", "large_nvfp4",
        (On(0, 0, IN_CI, EMULATED_W4A4), On(80, 99, RIGHT, EMULATED_W4A4), On(100, 129, COMPILED, _W4A4)),
        ANY, ("nvfp4",), batch=(1, "not examined"), form=Composed(product, "nvfp4"),
    ),
)  # fmt: skip
