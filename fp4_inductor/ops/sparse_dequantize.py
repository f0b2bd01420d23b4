"""``fp4.sparse_dequantize(values, meta, scale, global_scale, dtype) -> [..., N, K]``, zeros where nothing was kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import nvfp4, sparse24
from . import sparse_linear
from .contract import OpContract, no_gradient, refuse_gradient
from .dequantize import check_dtype


def reference(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`fp4_inductor.formats.sparse24.dequantize_sparse24`, with the parts checked."""
    check(values, meta, scale, global_scale, dtype)
    return sparse24.dequantize_sparse24(values, meta, scale, global_scale, dtype)


def check(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> None:
    sparse24.check_parts(values, meta, scale, global_scale)
    check_dtype(dtype)


def fake(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    check(values, meta, scale, global_scale, dtype)
    return values.new_empty(sparse24.STORAGE.logical(values.shape), dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("sparse_dequantize", ctx, scale=2, global_scale=3)


def sparse_dequantize_rows(values: Tensor, meta: Tensor, scale: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, K]`` from a matrix with a global scale for each row ``[R]``, as :func:`.dequantize.dequantize_rows`."""
    return torch.ops.fp4.sparse_dequantize(values.unsqueeze(1), meta.unsqueeze(1), scale.unsqueeze(1), row_scale, dtype).squeeze(1)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for i, shape in enumerate(((16, 32), (1, 32), (7, 96), (3, 5, 32), (2, 4, 64), (33, 32), (0, 32), (129, 160))):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        yield f"{shape} {dtype}", (*sparse_linear.random_weight(shape, device), dtype)


CONTRACT = OpContract(
    name="sparse_dequantize",
    schema="(Tensor values, Tensor meta, Tensor scale, Tensor global_scale, ScalarType dtype) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
)
CONTRACT.differentiate(no_gradient, _setup_context)
