"""torchao ``NVFP4Tensor``: ``X._weight_qdata``, ``X._weight_scale`` (padded to 128 x 4 tiles and swizzled), ``X._weight_per_tensor_scale``.

What each tensor is stands as JSON in the safetensors metadata. The swizzled order is the one of NVIDIA's block-scaled
GEMMs (cuBLAS "128x4 tiles"). Source: torchao.prototype.safetensors and torchao.prototype.mx_formats, versions 0.14 to 0.18.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import nvfp4
from ..safetensors_file import parse_json
from ..shards import Shards
from .modelopt import need_packed
from .weight import Found, StoredWeight, need, packed_k, unsupported

METHOD = "torchao"
_TILE_ROWS, _TILE_COLS = 128, 4
_KNOWN = {"qdata", "scale", "per_tensor_scale"}


def check(config: Mapping[str, Any]) -> None:
    types = config.get("quant_type")
    kinds = [kind.get("_type") for kind in types.values() if isinstance(kind, Mapping)] if isinstance(types, Mapping) else []
    strange = [k for k in kinds if not str(k).startswith("NVFP4")]
    if not kinds or strange:
        raise unsupported("torchao: quant_type", strange or config.get("quant_type"), "NVFP4WeightOnlyConfig, NVFP4DynamicActivation...")


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    for name, text in shards.metadata.items():
        if not text.startswith("{"):
            continue
        what = parse_json(text.encode(), f"metadata of {name}")
        kind = what.get("_type")
        if kind in ("Tensor", "torch.Tensor"):
            continue
        if kind != "NVFP4Tensor":
            raise unsupported(f"torchao: {name}", kind, "NVFP4Tensor, Tensor")
        found.add(_weight(name, what, shards))
    return found


def _weight(name: str, what: Mapping[str, Any], shards: Shards) -> StoredWeight:
    data, names = what.get("_data"), what.get("_tensor_data_names")
    if not isinstance(data, Mapping) or not isinstance(names, list) or not {"qdata", "scale"} <= set(names) <= _KNOWN:
        raise unsupported(f"torchao: {name}", names, sorted(_KNOWN))
    if data.get("block_size") != nvfp4.GROUP:
        raise unsupported(f"torchao: block_size of {name}", data.get("block_size"), nvfp4.GROUP)
    module, _, last = name.rpartition(".")

    def on_disk(part: str) -> str:
        return f"{module}._{last}_{part}" if module else f"_{last}_{part}"

    entries = shards.entries
    weight = need_packed(entries.get(on_disk("qdata")), on_disk("qdata"))
    n, k = weight.shape[0], packed_k(weight)
    cols = k // nvfp4.GROUP
    swizzled = data.get("is_swizzled_scales") is True
    shape = (_up(n, _TILE_ROWS) // _TILE_COLS, _up(cols, _TILE_COLS) * _TILE_COLS) if swizzled else (n, cols)
    parts = [weight, need(entries.get(on_disk("scale")), on_disk("scale"), shape, nvfp4.SCALE_DTYPE)]
    if "per_tensor_scale" in names:
        parts.append(need(entries.get(on_disk("per_tensor_scale")), on_disk("per_tensor_scale"), ((), (1,)), torch.float32))  # type: ignore[arg-type]
    return StoredWeight(name, (n, k), tuple(parts), functools.partial(_decode, swizzled))


def _up(n: int, multiple: int) -> int:
    return n + -n % multiple


def _decode(swizzled: bool, qdata: Tensor, scale: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    n, cols = qdata.shape[0], qdata.shape[1] * 2 // nvfp4.GROUP
    if swizzled:
        scale = unswizzle(scale.view(torch.uint8), n, cols).view(nvfp4.SCALE_DTYPE)
    return qdata, scale, torch.ones(()) if whole is None else whole.reshape(())


def unswizzle(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Bytes in 128 x 4 tiles -> ``[rows, cols]``. Within a tile, row ``32 a + b`` and column ``c`` lie at ``16 b + 4 a + c``."""
    tiles = scale.reshape(_up(rows, _TILE_ROWS) // _TILE_ROWS, _up(cols, _TILE_COLS) // _TILE_COLS, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(_up(rows, _TILE_ROWS), -1)[:rows, :cols].contiguous()
