"""What ``model.save_pretrained()`` writes for a model quantized here: ``qdata``, ``scale``, ``global_scale``, ``input_scale``.

The native checkpoint of :func:`fp4_inductor.save` keeps the same tensors under other file names, with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import nvfp4
from ..safetensors_file import Entry
from ..shards import Shards
from .modelopt import need_packed
from .weight import Found, StoredWeight, need, packed_k, unsupported

METHOD = "fp4_inductor"
VERSION = 1


def check(config: Mapping[str, Any]) -> None:
    if config.get("version", VERSION) != VERSION:
        raise unsupported("fp4_inductor: version", config.get("version"), VERSION)


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    for name in shards.entries:
        if name.endswith(".qdata"):
            found.add(_weight(name.removesuffix(".qdata"), shards.entries))
    return found


def _weight(module: str, entries: Mapping[str, Entry]) -> StoredWeight:
    """``X.weight`` of a linear layer, the Parameter ``X`` of a module of experts."""
    codes = entries[f"{module}.qdata"]
    experts = len(codes.shape) == 3
    weight = need_packed(codes, f"{module}.qdata", dims=3 if experts else 2)
    k, lead = packed_k(weight), weight.shape[:-2]
    scale = need(entries.get(f"{module}.scale"), f"{module}.scale", (*weight.shape[:-1], k // nvfp4.GROUP), nvfp4.SCALE_DTYPE)
    whole = need(entries.get(f"{module}.global_scale"), f"{module}.global_scale", lead, torch.float32)
    of_input = entries.get(f"{module}.input_scale")
    if of_input is not None:
        need(of_input, of_input.name, ((), lead), torch.float32)
    name = module if experts else f"{module}.weight"
    return StoredWeight(name, (*weight.shape[:-1], k), (weight, scale, whole), _as_stored, input_scale=of_input)


def _as_stored(qdata: Tensor, scale: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qdata, scale, whole
