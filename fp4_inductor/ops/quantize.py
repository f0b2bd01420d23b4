"""``fp4.quantize(w, scale_search, global_scale, channel_weight) -> (qdata, scale, global_scale)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DeviceError
from ..formats import nvfp4
from .contract import OpContract, no_gradient, refuse_gradient


def reference(w: Tensor, scale_search: str = "amax", global_scale: Tensor | None = None, channel_weight: Tensor | None = None):
    """:func:`fp4_inductor.formats.nvfp4.quantize`; the returned global scale never aliases the given one."""
    qdata, scale, g = nvfp4.quantize(w, scale_search, global_scale, channel_weight)
    return qdata, scale, g.clone() if global_scale is not None else g


def fake(w: Tensor, scale_search: str = "amax", global_scale: Tensor | None = None, channel_weight: Tensor | None = None):
    nvfp4.check_weight(w)
    nvfp4.check_search(scale_search)
    if global_scale is not None and global_scale.device != w.device:
        raise DeviceError(
            "fp4.quantize: tensors on different devices",
            value=f"w {w.device}, global_scale {global_scale.device}",
            limit="one device",
            remedy="Move it with .to(weight.device).",
        )
    *lead, n, k = w.shape
    return (
        w.new_empty((*lead, n, k // 2), dtype=torch.uint8),
        w.new_empty((*lead, n, k // nvfp4.GROUP), dtype=nvfp4.SCALE_DTYPE),
        w.new_empty(tuple(lead), dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("quantize", ctx, w=0, global_scale=2, channel_weight=3)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for shape in ((16, 32), (1, 16), (7, 48), (3, 5, 16), (2, 4, 64), (33, 16), (0, 32), (129, 80)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{shape} {dtype}", (torch.randn(shape, device=device).to(dtype), "four_over_six")


CONTRACT = OpContract(
    name="quantize",
    schema='(Tensor w, str scale_search="amax", Tensor? global_scale=None, Tensor? channel_weight=None) -> (Tensor, Tensor, Tensor)',
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
)
CONTRACT.implement("CompositeExplicitAutograd", reference)
CONTRACT.differentiate(no_gradient, _setup_context)
