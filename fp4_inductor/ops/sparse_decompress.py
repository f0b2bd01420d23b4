"""``fp4.sparse_decompress(values, meta) -> qdata uint8 [..., N, K/2]``: the dense NVFP4 codes of a 2:4-sparse weight, bit for bit.

With the weight's own scales they are a dense NVFP4 weight, which every dense op takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import sparse24
from . import sparse_linear
from .contract import OpContract


def reference(values: Tensor, meta: Tensor) -> Tensor:
    """:func:`fp4_inductor.formats.sparse24.decompress`, with the parts checked."""
    check(values, meta)
    return sparse24.decompress(values, meta)


def check(values: Tensor, meta: Tensor) -> None:
    sparse24.check_packed(values, meta)


def fake(values: Tensor, meta: Tensor) -> Tensor:
    check(values, meta)
    return values.new_empty((*values.shape[:-1], values.shape[-1] * 2))


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for shape in ((16, 32), (1, 32), (7, 96), (3, 5, 32), (2, 4, 64), (33, 32), (0, 32), (129, 160)):
        yield f"{shape}", sparse_linear.random_weight(shape, device)[:2]


CONTRACT = OpContract(
    name="sparse_decompress",
    schema="(Tensor values, Tensor meta) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.uint8: 0.0},
)
CONTRACT.implement("CPU", lambda values, meta: reference(values.contiguous(), meta.contiguous()))
