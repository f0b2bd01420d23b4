"""What every module with one quantized weight shares: its component buffers and the bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .bits import BITS, BitBuffers
from .marker import Marked

# Model code asks ``next(module.parameters())`` for the dtype and the device that a module computes in.
PLACEHOLDER = "placeholder"


class PackedWeight(Marked, BitBuffers):
    """The components of one weight ``[..., N, K]`` of class :attr:`TENSOR` as buffers, and its ``bias`` ``[..., N]`` or None.

    Made with an all-zero weight. ``lead``: the leading dimensions, ``()`` or ``(E,)``. ``input_scale`` (float32, multiplying, the
    leading shape, or None) is what a W4A4 checkpoint recorded for its activations: kept for export, not used by a forward pass
    (one that rounds its activations, ``prefill="nvfp4"``, takes each token's own maximum).

    ``placeholder`` is a Parameter without elements, of the module's dtype and on its device: what ``next(module.parameters())`` finds
    in a module whose weights are all packed. It is frozen, and in no ``state_dict``.
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
        self.register_parameter(PLACEHOLDER, nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False))

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

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("scale", "dtype"):
            self._move_placeholder()

    def _move_placeholder(self) -> None:
        """To the device of the weight and the dtype of the module, which are set one after the other while the module is made."""
        held, scale = self.__dict__.get("_parameters", {}).get(PLACEHOLDER), getattr(self, "scale", None)
        if held is not None and scale is not None and (held.device, held.dtype) != (scale.device, self.dtype):
            self._parameters[PLACEHOLDER] = nn.Parameter(torch.empty(0, dtype=self.dtype, device=scale.device), requires_grad=False)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, but ``recurse=False``, by which tools ask what is in this module's part of a ``state_dict``, leaves the placeholder out."""
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            if recurse or name.rpartition(".")[2] != PLACEHOLDER:
                yield name, p

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + PLACEHOLDER]

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        held = self._parameters.pop(PLACEHOLDER)
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            self._parameters[PLACEHOLDER] = held
            self._move_placeholder()
