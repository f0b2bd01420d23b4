"""The kernels of fp4.linear_glu."""

from __future__ import annotations

from ..kernel import ANY, EMULATED, IN_CI, Kernel, On
from ..linear.kernels import FUSED_GLU

_GEMV = "the GEMV's loop over rows of gate and of up, and their product: one launch, nothing stored in between"
_APART = "fp4.linear by its own kernels, the product as a pointwise kernel behind it"
KERNELS = (
    Kernel("linear_glu", "triton_gemv_glu", "gemv", (On(80, 129, EMULATED, _GEMV),)),
    *FUSED_GLU,
    Kernel("linear_glu", "linear, then act * up", "unfused", (On(0, 129, IN_CI, _APART),), ANY),
)
