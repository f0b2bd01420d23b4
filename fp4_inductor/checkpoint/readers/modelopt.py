"""NVIDIA ModelOpt NVFP4: ``weight`` uint8, ``weight_scale`` E4M3, ``weight_scale_2`` float32 (multiplying), ``input_scale``.

Linear layers and per-expert weights ``[N, K/2]`` under the model's native names; gpt-oss experts fused and packed along
the second dimension from the end: ``gate_up_proj`` ``[E, K/2, N]`` with ``gate_up_proj_weight_scale`` ``[E, K/16, N]``.
Source: modelopt.torch.export (unified_export_hf), versions 0.37 to 0.47; real output in lowering_tests/fixtures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import nvfp4
from ..safetensors_file import Entry
from ..shards import Shards
from .weight import Found, StoredWeight, check_groups, need, packed_k, unsupported

METHOD = "modelopt"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_KV_CACHE = re.compile(r"\.(k_proj\.k_scale|v_proj\.v_scale|k_bmm_quantizer\..*|v_bmm_quantizer\..*)$")


def check(config: Mapping[str, Any]) -> None:
    # hf_quant_config.json nests what config.json spells out.
    body = config.get("quantization", config)
    algorithm = body.get("quant_algo") if isinstance(body, Mapping) else None
    layers = body.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None
    if isinstance(layers, Mapping):
        kinds = {name: layer.get("quant_algo") if isinstance(layer, Mapping) else layer for name, layer in layers.items()}
        others = {name: kind for name, kind in kinds.items() if kind not in _ALGORITHMS}
        if others:
            name, kind = min(others.items(), key=str)
            raise unsupported(f"modelopt: quant_algo of {name} and {len(others) - 1} other layers", kind, list(_ALGORITHMS))
    elif algorithm not in _ALGORITHMS:
        raise unsupported("modelopt: quant_algo", algorithm, list(_ALGORITHMS))
    if body.get("group_size", nvfp4.GROUP) != nvfp4.GROUP:
        raise unsupported("modelopt: group_size", body.get("group_size"), nvfp4.GROUP)
    check_groups(config, {"": nvfp4.GROUP}, METHOD)


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    entries = shards.entries
    for name, entry in entries.items():
        if name.endswith(".weight_scale_2"):
            found.add(_linear(name.removesuffix("_scale_2"), entries))
        elif name.endswith("_weight_scale_2"):
            found.add(_fused(name.removesuffix("_weight_scale_2"), entries))
        elif _KV_CACHE.search(name):
            found.ignored[name] = "scale of a quantized KV cache: the cache stays in high precision here"
        elif name.endswith(".pre_quant_scale"):
            raise unsupported(f"modelopt: {name} (AWQ: activations scaled per channel)", entry.shape, "plain NVFP4 weights")
    return found


def _linear(name: str, entries: Mapping[str, Entry]) -> StoredWeight:
    weight = need_packed(entries.get(name), name)
    n, k = weight.shape[0], packed_k(weight)
    scale = need(entries.get(f"{name}_scale"), f"{name}_scale", (n, k // nvfp4.GROUP), nvfp4.SCALE_DTYPE)
    second = need(entries.get(f"{name}_scale_2"), f"{name}_scale_2", ((), (1,)), torch.float32)  # type: ignore[arg-type]
    of_input = entries.get(f"{name.removesuffix('weight')}input_scale")
    if of_input is not None:
        need(of_input, of_input.name, ((), (1,)), torch.float32)  # type: ignore[arg-type]
    return StoredWeight(name, (n, k), (weight, scale, second), _as_stored, input_scale=of_input)


def _fused(name: str, entries: Mapping[str, Entry]) -> StoredWeight:
    weight = need_packed(entries.get(name), name, dims=3)
    e, _, n = weight.shape
    k = packed_k(weight, dim=-2)
    scale = need(entries.get(f"{name}_weight_scale"), f"{name}_weight_scale", (e, k // nvfp4.GROUP, n), nvfp4.SCALE_DTYPE)
    second = need(entries.get(f"{name}_weight_scale_2"), f"{name}_weight_scale_2", ((), (1,), (e,), (e, 1, 1)), torch.float32)
    of_input = entries.get(f"{name}_input_scale")
    return StoredWeight(name, (e, k, n), (weight, scale, second), _along_rows, transposed=True, input_scale=of_input)


def need_packed(entry: Entry | None, name: str, dims: int = 2) -> Entry:
    """``entry``, if it is a uint8 tensor of ``dims`` dimensions."""
    shape = entry.shape if entry is not None and len(entry.shape) == dims else ("N", "K/2") if dims == 2 else ("E", "K/2", "N")
    return need(entry, name, shape, torch.uint8)  # type: ignore[arg-type]


def _as_stored(qdata: Tensor, scale: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qdata, scale, second.reshape(())


def _along_rows(weight: Tensor, scale: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes hold two consecutive k: moving whole bytes to the last dimension is all there is to do."""
    bits = scale.view(torch.uint8).mT.contiguous().view(nvfp4.SCALE_DTYPE)
    return weight.mT.contiguous(), bits, second.reshape(-1).expand(weight.shape[0]).contiguous()
