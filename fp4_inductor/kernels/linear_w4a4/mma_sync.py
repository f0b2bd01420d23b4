"""cuda_w4a4: fp4.linear_w4a4 on sm_120 and sm_121 (``csrc/gemm/linear_w4a4.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import EMULATED, Kernel, On
from .block_scaled import BLOCK_SCALED

LIBRARY = Library("gemm/linear_w4a4.cu", ("qdata", "scale"), ("half",), None, activations=("x_qdata", "x_scale", "row_scale"))
KERNELS = (
    Kernel(
        "linear_w4a4", "cuda_w4a4", "large_nvfp4", (On(120, 121, EMULATED, f"mma.sync: {BLOCK_SCALED}"),),
        k_multiple=64, one_scale=True, batch=(1, "not examined"), form=LIBRARY,
    ),
)  # fmt: skip
