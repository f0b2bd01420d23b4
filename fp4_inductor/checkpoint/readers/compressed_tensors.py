"""compressed-tensors (llm-compressor): ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

NVFP4: ``weight_packed`` uint8 ``[N, K/2]``, ``weight_scale`` E4M3 ``[N, K/16]``, ``weight_global_scale`` float32 ``[1]``,
which **divides**; W4A4 models add ``input_global_scale``. MXFP4: ``weight_scale`` uint8 exponents ``[N, K/32]``.
Source: compressed_tensors.compressors.nvfp4 and .mxfp4, versions 0.12 to 0.20; real output in lowering_tests/fixtures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...formats import mxfp4, nvfp4
from ..safetensors_file import Entry
from ..shards import Shards
from .modelopt import as_stored, need_packed
from .mx import decode as decode_mx
from .weight import Found, StoredWeight, check_groups, need, packed_k, unsupported

METHOD = "compressed-tensors"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_PACKED = ".weight_packed"


def check(config: Mapping[str, Any]) -> None:
    if config.get("quantization_status", "compressed") != "compressed":
        raise unsupported("compressed-tensors: quantization_status", config.get("quantization_status"), "compressed")
    if not config.get("config_groups"):
        raise unsupported("compressed-tensors: config_groups", config.get("config_groups"), "at least one group")
    if config.get("transform_config"):
        raise unsupported("compressed-tensors: transform_config (rotated activations)", list(config["transform_config"])[:4], "none")
    check_groups(config, {NVFP4: nvfp4.GROUP, MXFP4: mxfp4.GROUP}, METHOD)


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    for name in shards.entries:
        module, _, last = name.rpartition(".")
        if name.endswith(_PACKED):
            found.add(_linear(module, shards.entries), also=[f"{module}.{n}" for n in ("weight_shape",) if f"{module}.{n}" in shards.entries])
        elif last in ("k_scale", "v_scale", "q_scale"):
            found.ignored[name] = "scale of a quantized KV cache: the cache stays in high precision here"
        elif last == "weight_zero_point":
            raise unsupported(f"compressed-tensors: {name} (asymmetric weights)", "a zero point", "symmetric weights")
    return found


def _linear(module: str, entries: Mapping[str, Entry]) -> StoredWeight:
    name = f"{module}.weight"
    weight = need_packed(entries.get(f"{module}{_PACKED}"), f"{module}{_PACKED}")
    n, k = weight.shape[0], packed_k(weight)
    of_input = entries.get(f"{module}.input_global_scale")
    if of_input is not None:
        need(of_input, of_input.name, ((), (1,)), torch.float32)  # type: ignore[arg-type]
    scale = entries.get(f"{name}_scale")
    if scale is not None and scale.dtype == torch.uint8:
        packed_k(weight, group=mxfp4.GROUP)
        need(scale, scale.name, (n, k // mxfp4.GROUP), torch.uint8)
        return StoredWeight(name, (n, k), (weight, scale), decode_mx, input_scale=of_input, input_scale_divides=True, format=mxfp4.NAME)
    scale = need(scale, f"{name}_scale", (n, k // nvfp4.GROUP), nvfp4.SCALE_DTYPE)
    whole = need(entries.get(f"{name}_global_scale"), f"{name}_global_scale", ((), (1,)), torch.float32)  # type: ignore[arg-type]
    return StoredWeight(name, (n, k), (weight, scale, whole), as_stored, input_scale=of_input, input_scale_divides=True, straight=True, divides=True)
