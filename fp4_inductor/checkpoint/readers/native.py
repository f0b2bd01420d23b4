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
            found.add(_linear(name.removesuffix(".qdata"), shards.entries))
    return found


def _linear(module: str, entries: Mapping[str, Entry]) -> StoredWeight:
    weight = need_packed(entries.get(f"{module}.qdata"), f"{module}.qdata")
    n, k = weight.shape[0], packed_k(weight)
    scale = need(entries.get(f"{module}.scale"), f"{module}.scale", (n, k // nvfp4.GROUP), nvfp4.SCALE_DTYPE)
    whole = need(entries.get(f"{module}.global_scale"), f"{module}.global_scale", (), torch.float32)
    of_input = entries.get(f"{module}.input_scale")
    return StoredWeight(f"{module}.weight", (n, k), (weight, scale, whole), _as_stored, input_scale=of_input)


def _as_stored(qdata: Tensor, scale: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qdata, scale, whole
