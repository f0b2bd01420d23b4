"""``fp4.sparse_dequantize_fp8(values, meta, scale) -> float8_e4m3fn [N, K]``: the transient weight of the FP8 many-rows path.

As :mod:`.dequantize_fp8`, whose factor it shares, for a 2:4-sparse weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ShapeError
from ..formats import sparse24
from . import dequantize_fp8, sparse_linear
from .contract import OpContract


def reference(values: Tensor, meta: Tensor, scale: Tensor) -> Tensor:
    """The dense op's reference on the decompressed codes."""
    check(values, meta, scale)
    return dequantize_fp8.reference(sparse24.decompress(values, meta), scale)


def check(values: Tensor, meta: Tensor, scale: Tensor) -> None:
    sparse24.check_parts(values, meta, scale, values.new_empty(values.shape[:-2], dtype=torch.float32))
    if values.dim() != 2:
        raise ShapeError("fp4.sparse_dequantize_fp8 takes one matrix", value=tuple(values.shape), limit="[N, K/4]", remedy="Call it once per expert.")


def fake(values: Tensor, meta: Tensor, scale: Tensor) -> Tensor:
    check(values, meta, scale)
    return values.new_empty(sparse24.STORAGE.logical(values.shape), dtype=torch.float8_e4m3fn)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for shape in ((16, 32), (1, 32), (7, 96), (5, 64), (33, 160), (0, 32), (129, 64), (64, 128)):
        yield f"{shape}", sparse_linear.random_weight(shape, device)[:3]


CONTRACT = OpContract(
    name="sparse_dequantize_fp8",
    schema="(Tensor values, Tensor meta, Tensor scale) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float8_e4m3fn: 0.0},
)
CONTRACT.implement("CPU", reference)
