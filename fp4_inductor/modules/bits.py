"""A module whose buffers are bits, not numbers: device moves happen to them, casts do not, loading never converts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._torch import ddp
from ..errors import DTypeError
from ..formats import nvfp4
from ..formats.storage import Storage
from ..tensors import NVFP4Tensor
from ..tensors.base import FP4Tensor
from ..tensors.pickled import as_bytes, from_bytes

# The integer dtype of the same width that stands for a buffer's bits.
BITS = {1: torch.uint8, 4: torch.int32}
_DENSE = "Use dequantize() for a dense weight."


class BitBuffers(nn.Module):
    """Holds some of the components of :attr:`TENSOR` as buffers, and :attr:`dtype`, the dtype it computes in.

    ``.to(dtype)``, ``.half()``, ``.bfloat16()`` cast a bias and set :attr:`dtype`; codes and scales keep their bits.
    """

    TENSOR: ClassVar[type[FP4Tensor]] = NVFP4Tensor
    dtype: torch.dtype
    scale: Tensor

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._check_dtype(dtype)
        self.dtype = dtype

    @classmethod
    def storage(cls) -> Storage:
        """How the weight lies in the buffers."""
        return cls.TENSOR.STORAGE

    @classmethod
    def _bit_dtypes(cls) -> dict[str, torch.dtype]:
        """The buffers that keep their bits: the weight's components, and the scale a checkpoint recorded for the activations."""
        return {part.name: part.dtype for part in cls.storage().parts} | {"input_scale": torch.float32}

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError(f"{type(self).__name__} computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=_DENSE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        # nn.Module.to(dtype) casts every floating tensor: show fn integers of the same width.
        dtype = self._probe(fn, self.dtype)
        self._check_dtype(dtype)
        held = {name: real for name, real in self._bit_dtypes().items() if self._buffers.get(name) is not None}
        for bits in {BITS[real.itemsize] for real in held.values()}:
            if self._probe(fn, bits) != bits:
                raise DTypeError(f"the codes and scales of {type(self).__name__} cannot be cast", value=self._probe(fn, bits), limit=bits, remedy=_DENSE)
        for name, real in held.items():
            self._buffers[name] = self._buffers[name].view(BITS[real.itemsize])  # type: ignore[union-attr]
        try:
            super()._apply(fn, recurse)
        finally:
            for name, real in held.items():
                self._buffers[name] = self._buffers[name].view(real)  # type: ignore[union-attr]
        self.dtype = dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        state["_buffers"] = {name: None if t is None else as_bytes(t) for name, t in self._buffers.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, real in self._bit_dtypes().items():
            if (t := self._buffers.get(name)) is not None:
                self._buffers[name] = from_bytes(t, real)

    def _probe(self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
        """The dtype that ``fn`` turns ``dtype`` into."""
        device = self.scale.device
        return fn(torch.empty(0, dtype=dtype, device="cpu" if device.type == "meta" else device)).dtype

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # copy_ would convert: scale bytes stored as uint8 would become the numbers 0 to 255, silently.
        for name, dtype in self._bit_dtypes().items():
            value = state_dict.get(prefix + name)
            if value is not None and value.dtype != dtype:
                raise DTypeError(
                    f"{prefix}{name} in the state_dict has the wrong dtype", value=value.dtype, limit=dtype, remedy="Reinterpret bits with .view(dtype)."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _frozen(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Every path of every packed tensor in ``model``, and what lies in memory for it."""
    for path, module in model.named_modules(remove_duplicate=False):
        packed = isinstance(module, BitBuffers)
        held = module._buffers if packed else {}
        for name, t in held.items():
            if t is not None:
                yield f"{path}.{name}" if path else name, (t,)
        for name, p in module._parameters.items():
            if isinstance(p, FP4Tensor):
                yield f"{path}.{name}" if path else name, p.parts()
            elif packed and p is not None and not p.numel():  # a placeholder: never part of a graph, so DDP would wait for its gradient
                yield f"{path}.{name}" if path else name, ()


ddp.send_once(_frozen)
