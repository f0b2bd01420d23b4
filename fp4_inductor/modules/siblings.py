"""Sibling layers (q/k/v, gate/up) whose weights are adjacent rows of one buffer.

Several ``fp4.linear`` of one activation by row slices of one weight are one ``fp4.linear`` by that weight: a graph pass
(``passes/siblings.py``) sees the slices in the graph and merges the calls, without a copy of the weight in memory or per
call. In ``state_dict`` and in checkpoints every layer stays on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import nvfp4
from .bits import BitBuffers
from .linear import FP4Linear
from .packed import PackedWeight

PARTS = nvfp4.STORAGE.names
# Every layer's rows start at a multiple of 16, so that its codes and scales are 16-byte aligned for any K.
ROWS = 16


class SiblingWeight(BitBuffers):
    """The rows of several layers: ``qdata [R, K/2]``, ``scale [R, K/16]``, ``global_scale [S]``, ``bias [R]`` or None.

    Args:
        layers: S FP4Linear with the same K, dtype, device and ``prefill``; unchanged.

    The buffers are not persistent: each layer writes its own rows to a ``state_dict``. ``shared`` says that all global
    scales are equal, which lets even kernels that take one scale have all rows. Rows of a layer without bias hold -0.0,
    which adds nothing.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None

    def __init__(self, layers: Sequence[FP4Linear]):
        first = layers[0]
        super().__init__(first.dtype)
        self.starts: list[int] = []
        rows = 0
        for layer in layers:
            self.starts.append(rows + -rows % ROWS)
            rows = self.starts[-1] + layer.out_features
        biases = [layer.bias if layer.bias is not None else first.qdata.new_full((layer.out_features,), -0.0, dtype=first.dtype) for layer in layers]
        biased = any(layer.bias is not None for layer in layers)
        self.register_buffer("qdata", self._stack([layer.qdata for layer in layers]), persistent=False)
        self.register_buffer("scale", self._stack([layer.scale.view(torch.uint8) for layer in layers]).view(first.scale.dtype), persistent=False)
        self.register_buffer("global_scale", torch.stack([layer.global_scale for layer in layers]), persistent=False)
        self.register_buffer("bias", self._stack(biases) if biased else None, persistent=False)
        self.refresh()

    def _stack(self, parts: list[Tensor]) -> Tensor:
        """``parts`` one behind the other, each from its start on; zeros between."""
        padded: list[Tensor] = []
        rows = 0
        for start, part in zip(self.starts, parts, strict=True):
            if start > rows:
                padded.append(part.new_zeros(start - rows, *part.shape[1:]))
            padded.append(part)
            rows = start + part.shape[0]
        return torch.cat(padded)

    def refresh(self) -> None:
        """Find out again whether all global scales are equal. Reads values: call it where a synchronisation is welcome."""
        g = self.global_scale
        self.shared = g.device.type != "meta" and bool((g == g[0]).all())


class SiblingLinear(FP4Linear):
    """An FP4Linear whose weight is the rows from ``start`` on of a :class:`SiblingWeight`, which is its child ``packed``.

    ``qdata``, ``scale``, ``global_scale`` and ``bias`` are views of those rows. Assigning one of them, or
    ``load_state_dict(assign=True)``, gives the layer buffers of its own: it becomes a plain :class:`FP4Linear`.
    """

    packed: SiblingWeight
    index: int
    start: int
    has_bias: bool

    def _rows(self, name: str) -> Tensor:
        if name == "global_scale":
            return self.packed.global_scale.select(0, self.index)
        return getattr(self.packed, name).narrow(0, self.start, self.out_features)

    @property
    def qdata(self) -> Tensor:  # type: ignore[override]
        return self._rows("qdata")

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self._rows("scale")

    @property
    def global_scale(self) -> Tensor:  # type: ignore[override]
        return self._rows("global_scale")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self._rows("bias") if self.has_bias else None

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # A layer without bias passes its rows of -0.0 where a sibling has one.
        packed, start, n = self.packed, self.start, self.out_features
        if bias is None and packed.bias is not None:
            bias = packed.bias.narrow(0, start, n).to(x.dtype)
        # One element for all siblings where they are equal: the graph shows that.
        global_scale = packed.global_scale.select(0, 0 if packed.shared else self.index)
        return torch.ops.fp4.linear.default(x, packed.qdata.narrow(0, start, n), packed.scale.narrow(0, start, n), global_scale, bias, self.prefill)

    def unpack(self) -> FP4Linear:
        """Give this layer buffers of its own (copies); its siblings stay as they are."""
        own = {name: getattr(self, name).clone() for name in PARTS} | {"bias": self.bias.clone() if self.bias is not None else None}
        self._become_plain(own)
        return self

    def __setattr__(self, name: str, value) -> None:
        if (name in PARTS or name == "bias") and name not in self._buffers:
            self.unpack()
        PackedWeight.__setattr__(self, name, value)  # not super(): unpack() changed the class

    def _become_plain(self, own: dict[str, Tensor | None]) -> None:
        for name in ("packed", "index", "start", "has_bias"):
            delattr(self, name)
        self.__class__ = FP4Linear  # type: ignore[assignment]
        self._buffers.update(own)
        self._move_placeholder()

    @contextmanager
    def _as_buffers(self) -> Iterator[dict[str, Tensor]]:
        """Inside, the rows are this module's own buffers: torch reads and writes a state_dict entry through them."""
        views = {name: getattr(self, name) for name in (*PARTS, "bias") if name != "bias" or self.has_bias}
        self._buffers.update(views)
        try:
            yield views
        finally:
            for name in views:
                views[name] = self._buffers.pop(name)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        with self._as_buffers():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        with self._as_buffers() as views:
            before = dict(views)
            super()._load_from_state_dict(state_dict, prefix, *args)
        if any(views[name] is not before[name] for name in views):  # assign=True
            own = {name: value if value is not before[name] else value.clone() for name, value in views.items()}
            self._become_plain({"bias": None} | own)
        else:
            self.packed.refresh()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.start}:{self.start + self.out_features} of a packed weight"


def pack_siblings(layers: Sequence[FP4Linear]) -> SiblingWeight:
    """Move the weights of ``layers`` into one buffer, in place; each becomes a :class:`SiblingLinear`.

    Every bit stays; peak memory is one more copy of these layers' packed weights.

    Raises:
        ConfigError: fewer than two layers, one twice, already packed or with a bias that is a Parameter, or they differ in K, dtype, device
            or ``prefill``.
    """
    kinds = {(layer.in_features, layer.dtype, layer.qdata.device, layer.prefill) for layer in layers}
    plain = all(type(layer) is FP4Linear and layer._parameters.get("bias") is None for layer in layers)
    if len(layers) < 2 or len(kinds) != 1 or len({id(layer) for layer in layers}) != len(layers) or not plain:
        raise ConfigError(
            "these layers cannot be packed into one weight",
            value=[f"{type(layer).__name__}({layer.extra_repr()})" for layer in layers],
            limit="two or more different FP4Linear with one K, dtype, device and prefill, without trainable biases",
            remedy="Leave out those that differ.",
        )
    packed = SiblingWeight(layers)
    for i, (layer, start) in enumerate(zip(layers, packed.starts, strict=True)):
        has_bias = layer.bias is not None
        for name in (*PARTS, "bias"):
            del layer._buffers[name]
        layer.__class__ = SiblingLinear
        member = cast("SiblingLinear", layer)
        member.index, member.start, member.has_bias = i, start, has_bias
        member.packed = packed
    return packed
