"""The kernels of fp4.linear_w4a4, activations and weight in NVFP4."""

from __future__ import annotations

from ..kernel import ANY, COMPILED, EMULATED, IN_CI, RIGHT, Kernel, On
from ..linear.kernels import EMULATED_W4A4

_BLOCK_SCALED = "FP4 tensor cores take codes and E4M3 scales as they lie in memory"
_CPU = "activations in float32 and the C kernel of fp4.linear: nothing is gained, it serves to judge quality"
_BATCH = (1, "not examined")
KERNELS = (
    Kernel("linear_w4a4", "cpu", "cpu", (On(0, 0, IN_CI, _CPU),), ANY, batch=_BATCH),
    Kernel(
        "linear_w4a4", "cuda_w4a4", "large_nvfp4", (On(120, 121, EMULATED, f"mma.sync: {_BLOCK_SCALED}"),),
        k_multiple=64, csrc="linear_w4a4", one_scale=True, batch=_BATCH,
    ),
    Kernel("linear_w4a4", "triton_w4a4", "large_nvfp4", (On(100, 120, COMPILED, _BLOCK_SCALED), On(121, 129, COMPILED, _BLOCK_SCALED, (3, 8))), batch=_BATCH),
    Kernel("linear_w4a4", "dequantize both + mm", "large_dense", (On(80, 129, RIGHT, EMULATED_W4A4),), ANY, batch=_BATCH),
)  # fmt: skip
