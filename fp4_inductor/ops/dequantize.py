"""``fp4.dequantize(qdata, scale, global_scale, dtype) -> [..., N, K]``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DTypeError
from ..formats import nvfp4
from .contract import OpContract, no_gradient, refuse_gradient


def reference(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`fp4_inductor.formats.nvfp4.dequantize`, with the parts checked."""
    check(qdata, scale, global_scale, dtype)
    return nvfp4.dequantize(qdata, scale, global_scale, dtype)


def check(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> None:
    nvfp4.check_parts(qdata, scale, global_scale)
    check_dtype(dtype)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless a weight can be dequantised to ``dtype``."""
    if dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError(
            "NVFP4 dequantises to a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast the result with .to(dtype)."
        )


def fake(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    check(qdata, scale, global_scale, dtype)
    return qdata.new_empty((*qdata.shape[:-1], qdata.shape[-1] * 2), dtype=dtype)


def dequantize_rows(qdata: Tensor, scale: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, K]`` from a matrix with a global scale for each row ``[R]``: every row a matrix of its own, as the op takes one per matrix."""
    return torch.ops.fp4.dequantize(qdata.unsqueeze(1), scale.unsqueeze(1), row_scale, dtype).squeeze(1)


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("dequantize", ctx, scale=1, global_scale=2)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for shape in ((16, 32), (1, 16), (7, 48), (3, 5, 16), (2, 4, 64), (33, 16), (0, 32), (129, 80)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{shape} {dtype}", (*nvfp4.quantize(torch.randn(shape, device=device)), dtype)


CONTRACT = OpContract(
    name="dequantize",
    schema="(Tensor qdata, Tensor scale, Tensor global_scale, ScalarType dtype) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
)
CONTRACT.differentiate(no_gradient, _setup_context)
