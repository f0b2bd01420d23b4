"""ModelOpt's layout, as TensorRT-LLM and vLLM serve it: see :mod:`..readers.modelopt`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import nvfp4
from ...tensors import NVFP4Tensor
from ..readers.modelopt import MIXED
from ..readers.weight import unsupported

METHOD = "modelopt"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # the version whose layout this is; readers look at the name


def tensors(name: str, weight: NVFP4Tensor, input_scale: Tensor | None) -> dict[str, Tensor]:
    """``name``: of the dense weight, ``X.weight``; experts stored transposed (gpt-oss) have no ``.weight``. The global scale is stored as it is."""
    if weight.dim() == 3:
        return _fused(name, weight, input_scale)
    out = {name: weight.qdata, f"{name}_scale": weight.scale, f"{name}_scale_2": weight.global_scale}
    return out if input_scale is None else out | {f"{name.removesuffix('weight')}input_scale": input_scale}


def _fused(name: str, weight: NVFP4Tensor, input_scale: Tensor | None) -> dict[str, Tensor]:
    """gpt-oss: packed along the second dimension from the end, one global scale per expert (ModelOpt writes one for all; readers take both)."""
    if not weight.transposed:
        raise unsupported(f"modelopt: {name}", "experts stacked [E, N, K]", "one file entry per expert, or gpt-oss' [E, K, N]")
    bits = weight.scale.view(torch.uint8).mT.contiguous().view(nvfp4.SCALE_DTYPE)
    out = {name: weight.qdata.mT.contiguous(), f"{name}_weight_scale": bits, f"{name}_weight_scale_2": weight.global_scale}
    return out if input_scale is None else out | {f"{name}_input_scale": input_scale.amax()}


def remark(weights: Mapping[str, NVFP4Tensor]) -> str | None:
    """What is not exact about this layout for these weights: nothing."""
    return None


def fp8_tensors(name: str, weight: Tensor, scale: Tensor, input_scale: Tensor | None) -> dict[str, Tensor]:
    """A layer in E4M3 with one scale, as a MIXED_PRECISION checkpoint has it."""
    out = {name: weight, f"{name}_scale": scale.reshape(())}
    return out if input_scale is None else out | {f"{name.removesuffix('weight')}input_scale": input_scale.reshape(())}


def config(ignore: Iterable[str], activations: bool, fp8: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """``quantization_config``.

    Args:
        ignore: layers in high precision.
        activations: every NVFP4 layer has an input scale, so that a server may quantize activations too (W4A4).
        fp8: every quantized layer -> is it in FP8; None if none is.
    """
    kinds = [_algorithm(activations)] + (["FP8"] if fp8 else [])
    groups: dict[str, Any] = {}
    for i, kind in enumerate(kinds):
        bits = (
            {"dynamic": False, "num_bits": 8, "type": "float"}
            if kind == "FP8"
            else {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.GROUP}
        )
        targets = sorted(name for name, eight in fp8.items() if eight == (kind == "FP8")) if fp8 else ["Linear"]
        groups[f"group_{i}"] = {"weights": bits, "targets": targets} | ({"input_activations": bits} if activations or kind == "FP8" else {})
    body = {"config_groups": groups, "ignore": list(ignore), "quant_algo": MIXED if fp8 else kinds[0], "producer": PRODUCER, "quant_method": METHOD}
    return body | ({"quantized_layers": _layers(fp8, activations)} if fp8 else {})


def other_files(ignore: Iterable[str], activations: bool, fp8: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """JSON files besides config.json."""
    body: dict[str, Any] = {"quant_algo": MIXED if fp8 else _algorithm(activations), "kv_cache_quant_algo": None}
    body |= {"quantized_layers": _layers(fp8, activations)} if fp8 else {"group_size": nvfp4.GROUP}
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": body | {"exclude_modules": list(ignore)}}}


def _algorithm(activations: bool) -> str:
    return "NVFP4" if activations else "W4A16_NVFP4"


def _layers(fp8: Mapping[str, bool], activations: bool) -> dict[str, dict[str, Any]]:
    return {name: {"quant_algo": "FP8"} if eight else {"quant_algo": _algorithm(activations), "group_size": nvfp4.GROUP} for name, eight in fp8.items()}
