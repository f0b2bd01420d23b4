"""What ``model.save_pretrained()`` writes for a model quantized here: the components of each weight under their names in memory.

NVFP4: ``qdata``, ``scale``, ``global_scale``; 2:4-sparse: ``values``, ``meta`` and the scales; FP8: ``qdata`` E4M3 and ``scale``
float32 ``[N]``; each with ``input_scale`` if a checkpoint recorded one. From version 2 on there is a marker (:mod:`...modules.marker`)
where a dense checkpoint has its weight: it stops readers that do not know this format.
The native checkpoint of :func:`fp4_inductor.save` keeps the same tensors under other file names, with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...formats import fp8, nvfp4, sparse24
from ...formats.storage import Storage
from ...modules.marker import is_marker
from ...tensors import Sparse24NVFP4Tensor
from ...tensors.base import FP4Tensor
from ..safetensors_file import Entry, Reader
from ..shards import Shards
from .weight import Found, StoredFP8, StoredWeight, need, packed_k, unsupported

METHOD = "fp4_inductor"
VERSION = 2
_READ = (1, VERSION)
_FIRST = {".qdata": nvfp4.STORAGE, ".values": sparse24.STORAGE}  # a weight's first component says its format
_AGAIN = "Download the checkpoint again, or quantize the model again."


@dataclass(frozen=True)
class StoredSparse24(StoredWeight):
    """A 2:4-sparse weight; ``decode`` gives ``(values, meta, scale, global_scale)``."""

    format: str = sparse24.NAME

    def like_meta(self, dtype: torch.dtype) -> FP4Tensor:  # type: ignore[override]
        shapes = sparse24.STORAGE.shapes(self.shape)
        parts = [torch.empty(shapes[part.name], dtype=part.dtype, device="meta") for part in sparse24.STORAGE.parts]
        return Sparse24NVFP4Tensor._of_parts(parts, dtype, False)

    def read(  # type: ignore[override]
        self, reader: Reader, dtype: torch.dtype, device: torch.device | None = None, *, as_stored: bool = False
    ) -> FP4Tensor:
        values, meta, scale, whole = self.decode(*(reader.read(part) for part in self.parts))
        values, meta, scale, whole = self._packed(values, scale, whole, meta=meta)
        return Sparse24NVFP4Tensor(values, meta, scale, whole, dtype)


def check(config: Mapping[str, Any]) -> None:
    if config.get("version", VERSION) not in _READ:
        raise unsupported("fp4_inductor: version", config.get("version"), list(_READ))


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    entries = shards.entries
    for name, entry in entries.items():
        if is_marker(entry.dtype, entry.shape):
            found.used.add(name)
        for suffix, storage in _FIRST.items():
            if name.endswith(suffix):
                module = name.removesuffix(suffix)
                found.add(_fp8(module, entries) if entry.dtype == fp8.DTYPE else _weight(module, entries, storage))
    return found


def _weight(module: str, entries: Mapping[str, Entry], storage: Storage) -> StoredWeight:
    """``X.weight`` of a linear layer, the Parameter ``X`` of a module of experts."""
    first = entries[f"{module}.{storage.names[0]}"]
    experts = len(first.shape) == 3
    k = packed_k(first) if storage is nvfp4.STORAGE else storage.logical(first.shape or (0,))[-1]
    lead, n = first.shape[:-2], first.shape[-2] if len(first.shape) in (2, 3) else -1
    if n < 0 or k % storage.k_multiple:
        limit = f"[N, K/{storage.parts[0].k}] or [E, N, K/{storage.parts[0].k}], K a multiple of {storage.k_multiple}"
        raise CheckpointError(f"{first.name} is no packed matrix of whole blocks", value=first.shape, limit=limit, remedy=_AGAIN)
    shape = (*lead, n, k)
    parts = tuple(need(entries.get(f"{module}.{part.name}"), f"{module}.{part.name}", storage.shapes(shape)[part.name], part.dtype) for part in storage.parts)
    kind = StoredWeight if storage is nvfp4.STORAGE else StoredSparse24
    return kind(module if experts else f"{module}.weight", shape, parts, _as_stored, input_scale=_input_scale(module, entries, lead))


def _fp8(module: str, entries: Mapping[str, Entry]) -> StoredFP8:
    first = entries[f"{module}.qdata"]
    qdata = need(first, first.name, first.shape if len(first.shape) == 2 else ("N", "K"), fp8.DTYPE)  # type: ignore[arg-type]
    scale = need(entries.get(f"{module}.scale"), f"{module}.scale", qdata.shape[:1], torch.float32)
    return StoredFP8(f"{module}.weight", qdata.shape, (qdata, scale), _as_stored, input_scale=_input_scale(module, entries, ()))


def _input_scale(module: str, entries: Mapping[str, Entry], lead: tuple[int, ...]) -> Entry | None:
    entry = entries.get(f"{module}.input_scale")
    return None if entry is None else need(entry, entry.name, ((), lead), torch.float32)


def _as_stored(*parts: Tensor) -> tuple[Tensor, ...]:
    return parts
