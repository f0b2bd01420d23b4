"""Float8 tensors in a pickle: as uint8 views, for ``pickle`` cannot store a float8 tensor (torch's storages have no such type)."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Views that a pickler, a copy or a model holds. One view for one piece of memory: modules that share a tensor share its view, and
# a pickle keeps one object one object.
_VIEWS: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()


def as_bytes(t: Tensor) -> Tensor:
    """``t``, or the uint8 view of a float8 ``t``."""
    return _view(t, torch.uint8) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t


def from_bytes(t: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`as_bytes` was given; ``t`` itself if it has ``dtype`` already."""
    return t if t.dtype == dtype else _view(t, dtype)


def _view(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.device.type == "meta" or not t.numel():
        return t.view(dtype)
    key = (t.data_ptr(), t.shape, t.stride(), t.device, dtype)
    found = _VIEWS.get(key)
    if found is None:
        found = _VIEWS[key] = t.detach().view(dtype)
    return found


def rebuild(cls: Any, parts: tuple[Tensor, ...], dtype: torch.dtype, transposed: bool, requires_grad: bool, rest: dict[str, Any]) -> Tensor:
    """The quantized tensor that a pickle describes: the components, proved as for any new tensor, and its other attributes."""
    real = (from_bytes(part, spec.dtype) for part, spec in zip(parts, cls.STORAGE.parts, strict=True))
    t = cls(*real, dtype, transposed)
    vars(t).update(rest)
    return t.requires_grad_(requires_grad) if requires_grad else t


torch.serialization.add_safe_globals([rebuild])
