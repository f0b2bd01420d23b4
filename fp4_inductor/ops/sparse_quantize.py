"""``fp4.sparse_quantize(w, mask, scale_search, global_scale, channel_weight) -> (values, meta, scale, global_scale)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import nvfp4, sparse24
from . import quantize
from .contract import OpContract, no_gradient, refuse_gradient


def reference(
    w: Tensor, mask: Tensor | None = None, scale_search: str = "amax", global_scale: Tensor | None = None, channel_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`fp4_inductor.formats.sparse24.quantize_sparse24`; the returned global scale never aliases the given one."""
    parts = sparse24.quantize_sparse24(w, mask, scale_search, global_scale, channel_weight)
    return parts if global_scale is None else parts._replace(global_scale=parts.global_scale.clone())


def fake(w: Tensor, mask: Tensor | None = None, scale_search: str = "amax", global_scale: Tensor | None = None, channel_weight: Tensor | None = None):
    sparse24.check_weight(w)
    if mask is not None:
        sparse24.check_mask_shape(mask, w)
    _, scale, g = quantize.fake(w, scale_search, global_scale, channel_weight)
    shapes = sparse24.STORAGE.shapes(w.shape)
    return w.new_empty(shapes["values"], dtype=torch.uint8), w.new_empty(shapes["meta"], dtype=torch.uint8), scale, g


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("sparse_quantize", ctx, w=0, global_scale=3, channel_weight=4)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for i, shape in enumerate(((16, 32), (1, 32), (7, 96), (3, 5, 32), (2, 4, 64), (33, 32), (0, 32), (129, 160))):
        w = torch.randn(shape, device=device).to((torch.float32, torch.bfloat16)[i % 2])
        mask = sparse24.magnitude_mask(w)
        yield f"{shape} {w.dtype}", (w, mask, "four_over_six") if i % 3 else (w * mask, None, "mse")


CONTRACT = OpContract(
    name="sparse_quantize",
    schema='(Tensor w, Tensor? mask=None, str scale_search="amax", Tensor? global_scale=None, Tensor? channel_weight=None) -> (Tensor, Tensor, Tensor, Tensor)',
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
)
CONTRACT.implement("CompositeExplicitAutograd", reference)
CONTRACT.differentiate(no_gradient, _setup_context)
