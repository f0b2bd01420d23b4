"""A module whose buffers are bits, not numbers: device moves happen to them, casts do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import DTypeError
from ..formats import nvfp4

DENSE = "Use dequantize() for a dense weight."
PARTS = {"qdata": torch.uint8, "scale": nvfp4.SCALE_DTYPE, "global_scale": torch.float32}
# The integer dtype of the same width that stands for a dtype's bits.
_BITS = {1: torch.uint8, 4: torch.int32}


class BitBuffers(nn.Module):
    """``_apply`` and ``load_state_dict`` of a module that holds some of :attr:`parts` as buffers.

    ``nn.Module.to(dtype)`` casts every floating tensor: codes and scales are shown to it as integers of the same width.
    """

    parts: ClassVar[dict[str, torch.dtype]] = PARTS

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BitBuffers:
        held = {name: _BITS[dtype.itemsize] for name, dtype in self.parts.items() if self._buffers.get(name) is not None}
        for bits in set(held.values()):
            if (cast := probe(self, fn, bits)) != bits:
                raise DTypeError(f"the codes and scales of {type(self).__name__} cannot be cast", value=cast, limit=bits, remedy=DENSE)
        for name, bits in held.items():
            self._buffers[name] = self._buffers[name].view(bits)  # type: ignore[union-attr]
        try:
            super()._apply(fn, recurse)
        finally:
            for name in held:
                self._buffers[name] = self._buffers[name].view(self.parts[name])  # type: ignore[union-attr]
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # copy_ would convert: scale bytes stored as uint8 would become the numbers 0 to 255, silently.
        for name, dtype in self.parts.items():
            value = state_dict.get(prefix + name)
            if value is not None and value.dtype != dtype:
                raise DTypeError(
                    f"{prefix}{name} in the state_dict has the wrong dtype", value=value.dtype, limit=dtype, remedy="Reinterpret bits with .view(dtype)."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantizedLinear(BitBuffers):
    """What the quantized linear layers share: an activation :attr:`dtype` that ``.to(dtype)`` sets."""

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        dtype = probe(self, fn, self.dtype)
        check_dtype(self, dtype)
        super()._apply(fn, recurse)
        self.dtype = dtype
        return self


def check_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a dtype in which no quantized layer computes."""
    if dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError(f"{type(module).__name__} computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=DENSE)


def probe(module: BitBuffers, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """The dtype that ``fn`` turns ``dtype`` into, on the device of ``module``'s codes."""
    device: Any = getattr(module, next(iter(module.parts))).device
    return fn(torch.empty(0, dtype=dtype, device="cpu" if device.type == "meta" else device)).dtype
