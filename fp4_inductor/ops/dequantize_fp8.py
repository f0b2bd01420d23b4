"""``fp4.dequantize_fp8(qdata, scale) -> float8_e4m3fn [N, K]``: the transient weight of the FP8 many-rows path.

    w8 = e4m3(e2m1 * scale * WEIGHT_FACTOR);   W = w8 * (global_scale / WEIGHT_FACTOR)

One power of two for every tensor: 6 * 448 / 8 = 336 always fits E4M3, no data-dependent pass is needed, and the product
is exact wherever the scale's mantissa is 1.0, 1.25 or 1.5. ``lowering_tests/quality/test_fp8_path.py`` bounds what the rest costs a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ShapeError
from ..formats import e2m1, nvfp4
from .contract import OpContract

WEIGHT_FACTOR = 0.125


def reference(qdata: Tensor, scale: Tensor) -> Tensor:
    """Exact product in float32, one rounding to E4M3."""
    check(qdata, scale)
    values = e2m1.decode(e2m1.unpack(qdata)).unflatten(-1, (-1, nvfp4.GROUP))
    return (values * (scale.float() * WEIGHT_FACTOR).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)


def check(qdata: Tensor, scale: Tensor) -> None:
    nvfp4.check_parts(qdata, scale, qdata.new_empty(qdata.shape[:-2], dtype=torch.float32))
    if qdata.dim() != 2:
        raise ShapeError("fp4.dequantize_fp8 takes one matrix", value=tuple(qdata.shape), limit="[N, K/2]", remedy="Call it once per expert.")


def fake(qdata: Tensor, scale: Tensor) -> Tensor:
    check(qdata, scale)
    return qdata.new_empty((qdata.shape[0], qdata.shape[1] * 2), dtype=torch.float8_e4m3fn)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for n, k in ((16, 32), (1, 16), (7, 48), (5, 16), (33, 80), (0, 32), (129, 80), (64, 128)):
        yield f"{(n, k)}", nvfp4.quantize(torch.randn(n, k, device=device))[:2]


def fp8_product(x8: Tensor, x_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``x8 [M, K]`` (E4M3, ``x_scale [M, 1]``) times the transient weight's transpose, in plain operations: eager and lowered alike."""
    return scaled_product(x8, x_scale, torch.ops.fp4.dequantize_fp8(qdata, scale), global_scale, dtype, bias)


def scaled_product(x8: Tensor, x_scale: Tensor, w8: Tensor, global_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The same from the transient weight ``w8 [N, K]``."""
    return rowwise_product(x8, x_scale, w8, x_scale.new_full((1, w8.shape[0]), 1.0 / WEIGHT_FACTOR) * global_scale, dtype, bias)


def rowwise_product(x8: Tensor, x_scale: Tensor, w8: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``x8 [M, K]`` times ``w8 [N, K]``'s transpose, both E4M3, with scales ``[M, 1]`` and ``[1, N]``.

    Not in the tensor cores' own accumulators (``use_fast_accum``): with a bias cuBLAS has no such product for some sizes (N = 512, an odd M), and what
    it gains, 6% to 8% at M = 512 to 2048 on an H200, the kernel that needs no transient weight has outdone.
    """
    return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale, bias=bias, out_dtype=dtype)


CONTRACT = OpContract(
    name="dequantize_fp8",
    schema="(Tensor qdata, Tensor scale) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float8_e4m3fn: 0.0},
)
CONTRACT.implement("CPU", reference)
