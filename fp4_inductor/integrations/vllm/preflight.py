"""Look into a folder before vLLM starts a process or takes memory: is every scale there, in its shape, and a number?

Block scales are read with the weights (a sixteenth of them is too much to read twice); the other checks are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.readers import FORMATS, StoredWeight
from ...checkpoint.readers.weight import StoredFP8
from ...checkpoint.safetensors_file import Entry, Reader
from ...checkpoint.shards import open_shards
from ...errors import CheckpointError


def check_folder(folder: Path, source: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a local checkpoint of ModelOpt or compressed-tensors that would give wrong numbers.

    A hub id, and a folder without weights (``load_format="dummy"``), are not looked into.
    """
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return
    method = str(source.get("quant_method", "")).lower()
    shards = open_shards(folder)
    modelopt = method.startswith("modelopt")
    check_complete(shards.entries, "weight_scale", "weight_scale_2" if modelopt else "weight_global_scale", () if modelopt else ("weight_packed",))
    found = FORMATS["modelopt" if modelopt else method].find(shards, source)
    check_scales(list(found.weights.values()))


def check_complete(entries: Mapping[str, Entry], scale: str, global_scale: str, codes: tuple[str, ...]) -> None:
    """Raise CheckpointError if of an NVFP4 weight one tensor is there and another is not.

    Other formats have a ``weight_scale``, too. It is no NVFP4 weight's if it is not in E4M3.
    """
    for name, entry in entries.items():
        owner, _, last = name.rpartition(".")
        kinds = (scale, global_scale, *codes)
        if last not in kinds or (last == scale and entry.dtype != torch.float8_e4m3fn):
            continue
        if absent := [f"{owner}.{kind}" for kind in kinds if f"{owner}.{kind}" not in entries]:
            raise CheckpointError(
                f"{absent[0]} is missing",
                value=f"{name} is there",
                limit="all tensors of a weight",
                remedy="Download the checkpoint again, or quantize the model again.",
            )


def check_scales(weights: list[StoredWeight]) -> None:
    """Raise CheckpointError if a global scale is not finite and positive."""
    with Reader() as reader:
        for weight in weights:
            if isinstance(weight, StoredFP8) or not weight.packed:
                continue
            stored = weight.parts[-1]
            value = reader.read(stored)
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise CheckpointError(
                    f"{stored.name} must be finite and positive",
                    value=value.flatten()[:4].tolist(),
                    limit="finite and > 0",
                    remedy="Download the checkpoint again, or quantize the model again.",
                )
