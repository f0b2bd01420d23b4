"""fp4.linear_epilogue and fp4.linear_glu in two steps: fp4.linear by its own kernels, pointwise operations behind it."""

from __future__ import annotations

from ..kernel import ANY, IN_CI, Kernel, On

KERNELS = (
    Kernel("linear_epilogue", "linear, then pointwise", "unfused", (On(0, 129, IN_CI, "fp4.linear by its own kernels; Inductor fuses the rest"),), ANY),
    Kernel(
        "linear_glu", "linear, then act * up", "unfused",
        (On(0, 129, IN_CI, "fp4.linear by its own kernels, the product as a pointwise kernel behind it"),), ANY,
    ),
)  # fmt: skip
