"""NVIDIA ModelOpt NVFP4: ``weight`` uint8, ``weight_scale`` E4M3, ``weight_scale_2`` float32 (multiplying), ``input_scale``.

Linear layers and per-expert weights ``[N, K/2]`` under the model's native names; gpt-oss experts fused and packed along
the second dimension from the end: ``gate_up_proj`` ``[E, K/2, N]`` with ``gate_up_proj_weight_scale`` ``[E, K/16, N]``.
MIXED_PRECISION: ``quantized_layers`` names each layer's algorithm; its FP8 layers are ``weight`` E4M3 ``[N, K]``, ``weight_scale``
float32 ``[]`` (multiplying), ``input_scale``. FP8 here is E4M3 with one scale a row: a layer is kept as it is stored.
Source: modelopt.torch.export (unified_export_hf, quant_utils, convert_hf_config), versions 0.37 to 0.47; real output of NVFP4
in lowering_tests/fixtures, MIXED_PRECISION from the exporter's source and vLLM's reader (no real file was at hand).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, list_names
from ...formats import fp8, nvfp4
from ..safetensors_file import Entry
from ..shards import Shards
from .weight import Found, StoredFP8, StoredWeight, check_groups, need, packed_k, unsupported

METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_KV_CACHE = re.compile(r"\.(k_proj\.k_(scale|bias)|v_proj\.v_(scale|bias)|k_bmm_quantizer\..*|v_bmm_quantizer\..*)$")
_IN_HIGH_PRECISION = "the cache stays in high precision here"


def check(config: Mapping[str, Any]) -> None:
    body = _body(config)
    algorithm = _algorithm(body)
    if algorithm == MIXED:
        _check_layers(body)
    elif algorithm not in _ALGORITHMS:
        raise unsupported("modelopt: quant_algo", body.get("quant_algo"), [*_ALGORITHMS, MIXED])
    else:
        check_groups(config, {"": nvfp4.GROUP}, METHOD)
    if body.get("group_size", nvfp4.GROUP) != nvfp4.GROUP:
        raise unsupported("modelopt: group_size", body.get("group_size"), nvfp4.GROUP)


def _body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """hf_quant_config.json nests what config.json spells out."""
    body = config.get("quantization", config)
    return body if isinstance(body, Mapping) else {}


def _algorithm(layer: object) -> str | None:
    """Some exporters write lower case."""
    value = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
    return value.upper() if isinstance(value, str) else None


def layers_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``quantized_layers`` of a MIXED_PRECISION checkpoint: layer -> ``{"quant_algo": ..., "group_size": ...}``; some are nested twice."""
    layers = _body(config).get("quantized_layers")
    inner = layers.get("quantized_layers") if isinstance(layers, Mapping) else None
    found = inner if isinstance(inner, Mapping) and "quant_algo" not in inner else layers
    return found if isinstance(found, Mapping) else {}


def _check_layers(body: Mapping[str, Any]) -> None:
    layers = layers_of(body)
    if not layers:
        raise CheckpointError(
            "modelopt: MIXED_PRECISION without quantized_layers",
            value=repr(body.get("quantized_layers"))[:80],
            limit="an object: layer -> quant_algo",
            remedy="Older exporters wrote it into hf_quant_config.json alone: put that file beside config.json and call fp4_inductor.load_pretrained.",
        )
    known = (*_ALGORITHMS, *_FP8)
    others: dict[str | None, list[str]] = {}
    for name, layer in layers.items():
        kind = _algorithm(layer)
        if kind not in known:
            others.setdefault(kind, []).append(name)
        elif kind in _ALGORITHMS and isinstance(layer, Mapping) and layer.get("group_size") not in (None, nvfp4.GROUP):
            raise unsupported(f"modelopt: group_size of {name}", layer["group_size"], nvfp4.GROUP)
    if others:
        count = sum(map(len, others.values()))
        named = "; ".join(f"{kind}: {list_names(names)}" for kind, names in others.items())
        raise unsupported(f"modelopt: quant_algo of {count} of {len(layers)} layers ({named})", list(others), list(known))


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    entries = shards.entries
    mixed = _algorithm(_body(config)) == MIXED
    for name, entry in entries.items():
        if name.endswith(".weight_scale_2"):
            found.add(_linear(name.removesuffix("_scale_2"), entries))
        elif name.endswith("_weight_scale_2"):
            found.add(_fused(name.removesuffix("_weight_scale_2"), entries))
        elif mixed and entry.dtype == fp8.DTYPE and name.endswith(".weight"):
            found.add(_fp8(name, entries))
        elif _KV_CACHE.search(name):
            found.ignored[name] = f"scale of a quantized KV cache: {_IN_HIGH_PRECISION}"
        elif name.endswith(".pre_quant_scale"):
            raise unsupported(f"modelopt: {name} (AWQ: activations scaled per channel)", entry.shape, "plain NVFP4 weights")
    cache = _body(config).get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    if cache and not found.ignored:
        kind = f"{cache.get('num_bits')}-bit {cache.get('type')}" if isinstance(cache, Mapping) else str(cache)[:40]
        found.notes.append(f"the checkpoint asks for a KV cache in {kind}: {_IN_HIGH_PRECISION}")
    if mixed:
        _agree(found, entries, layers_of(config))
    return found


def _agree(found: Found, entries: Mapping[str, Entry], layers: Mapping[str, Any]) -> None:
    """What config.json says of a layer is what is stored. Layers under other names (fused, or renamed by transformers) are judged by what is stored."""
    for name, weight in found.weights.items():
        said = _algorithm(layers.get(name.removesuffix(".weight")))
        if said is not None and isinstance(weight, StoredFP8) != (said in _FP8):
            raise CheckpointError(
                f"{name} is not stored as quantized_layers says",
                value="FP8" if isinstance(weight, StoredFP8) else "NVFP4",
                limit=said,
                remedy="config.json and the weights are of different models: download the checkpoint again.",
            )
    odd = next((n for n, w in found.weights.items() if isinstance(w, StoredFP8)), None)
    if odd is not None and not any(_algorithm(layer) in _FP8 for layer in layers.values()):
        raise CheckpointError(f"{odd} is stored in FP8", value="FP8", limit="an algorithm that quantized_layers names", remedy="Download the checkpoint again.")
    for what, names in {
        "are stored in high precision": [n for n in layers if f"{n}.weight" in entries and f"{n}.weight" not in found.weights],
        "have no weight under that name": [n for n in layers if f"{n}.weight" not in entries and n not in found.weights],
    }.items():
        if names:
            found.notes.append(f"{len(names)} layers of quantized_layers {what}: {list_names(names)}")


def _fp8(name: str, entries: Mapping[str, Entry]) -> StoredFP8:
    """``weight`` E4M3 ``[N, K]``, ``weight_scale`` float32: one for all (FP8), or one per row (FP8_PER_CHANNEL_PER_TOKEN)."""
    weight = need(entries[name], name, entries[name].shape if len(entries[name].shape) == 2 else ("N", "K"), fp8.DTYPE)  # type: ignore[arg-type]
    n = weight.shape[0]
    scale = need(entries.get(f"{name}_scale"), f"{name}_scale", ((), (1,), (n,), (n, 1)), torch.float32)
    of_input = entries.get(f"{name.removesuffix('weight')}input_scale")
    if of_input is not None:
        need(of_input, of_input.name, ((), (1,)), torch.float32)  # type: ignore[arg-type]
    return StoredFP8(name, weight.shape, (weight, scale), _as_it_is, input_scale=of_input)


def _linear(name: str, entries: Mapping[str, Entry]) -> StoredWeight:
    weight = need_packed(entries.get(name), name)
    n, k = weight.shape[0], packed_k(weight)
    scale = need(entries.get(f"{name}_scale"), f"{name}_scale", (n, k // nvfp4.GROUP), nvfp4.SCALE_DTYPE)
    second = need(entries.get(f"{name}_scale_2"), f"{name}_scale_2", ((), (1,)), torch.float32)  # type: ignore[arg-type]
    of_input = entries.get(f"{name.removesuffix('weight')}input_scale")
    if of_input is not None:
        need(of_input, of_input.name, ((), (1,)), torch.float32)  # type: ignore[arg-type]
    return StoredWeight(name, (n, k), (weight, scale, second), as_stored, input_scale=of_input, straight=True)


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


def _as_it_is(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return weight, scale


def as_stored(qdata: Tensor, scale: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of a matrix, none of which is changed."""
    return qdata, scale, second.reshape(())


def _along_rows(weight: Tensor, scale: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes hold two consecutive k: moving whole bytes to the last dimension is all there is to do."""
    bits = scale.view(torch.uint8).mT.contiguous().view(nvfp4.SCALE_DTYPE)
    return weight.mT.contiguous(), bits, second.reshape(-1).expand(weight.shape[0]).contiguous()
