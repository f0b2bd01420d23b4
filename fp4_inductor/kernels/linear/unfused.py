"""fp4.linear_epilogue, fp4.linear_glu and the ops of half an RMSNorm in steps: fp4.linear by its own kernels, pointwise operations behind it."""

from __future__ import annotations

from ..kernel import ANY, IN_CI, Kernel, On

KERNELS = (
    Kernel("linear_epilogue", "linear, then pointwise", "unfused", (On(0, 129, IN_CI, "fp4.linear by its own kernels; Inductor fuses the rest"),), ANY),
    Kernel(
        "linear_glu", "linear, then act * up", "unfused",
        (On(0, 129, IN_CI, "fp4.linear by its own kernels, the product as a pointwise kernel behind it"),), ANY,
    ),
    Kernel("linear_residual_squares", "linear, sum, squares", "unfused", (On(0, 129, IN_CI, "fp4.linear by its own kernels; Inductor fuses the rest"),), ANY),
    Kernel("rms_scaled_linear", "scaled, then linear", "unfused", (On(0, 129, IN_CI, "its activations are scaled by a pointwise kernel"),), ANY),
    Kernel("rms_scaled_linear_glu", "scaled, then glu", "unfused", (On(0, 129, IN_CI, "its activations are scaled by a pointwise kernel"),), ANY),
)  # fmt: skip
