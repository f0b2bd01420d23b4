"""What every module with one quantized weight shares: its component buffers and the bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bits import BITS, BitBuffers
from .marker import Marked


class PackedWeight(Marked, BitBuffers):
    """The components of one weight ``[..., N, K]`` of class :attr:`TENSOR` as buffers, and its ``bias`` ``[..., N]`` or None.

    Made with an all-zero weight. ``lead``: the leading dimensions, ``()`` or ``(E,)``. ``input_scale`` (float32, multiplying, the
    leading shape, or None) is what a W4A4 checkpoint recorded for its activations: kept for export, not used by a forward pass
    (one that rounds its activations, ``large_m="nvfp4"``, takes each token's own maximum).
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, lead: tuple[int, ...], n: int, k: int, bias: bool, dtype: torch.dtype, device: Any):
        super().__init__(dtype)
        shapes = self.storage().shapes((*lead, n, k))
        for part in self.storage().parts:
            zeros = torch.zeros(shapes[part.name], dtype=BITS[part.dtype.itemsize], device=device)
            self.register_buffer(part.name, zeros.view(part.dtype))
        self._empty_weight()
        self.register_buffer("input_scale", None)
        self.register_buffer("bias", torch.zeros(*lead, n, dtype=dtype, device=device) if bias else None)

    def _empty_weight(self) -> None:
        """Make the zero-filled buffers a legal weight, all zeros."""
        self.global_scale.fill_(1.0)

    def parts(self) -> tuple[Tensor, ...]:
        """The weight's buffers, in the order in which the ops take them."""
        return tuple(getattr(self, name) for name in self.TENSOR.PARTS)

    def take(self, parts: tuple[Tensor, ...]) -> None:
        """Make ``parts`` the weight's buffers."""
        for name, part in zip(self.TENSOR.PARTS, parts, strict=True):
            setattr(self, name, part)
