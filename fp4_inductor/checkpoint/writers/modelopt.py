"""ModelOpt's layout, as TensorRT-LLM and vLLM serve it: see :mod:`..readers.modelopt`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import nvfp4
from ...tensors import NVFP4Tensor
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


def config(ignore: Iterable[str], activations: bool) -> dict[str, Any]:
    """``quantization_config``. ``activations``: every layer has an input scale, so that a server may quantize activations too (W4A4)."""
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.GROUP}
    group = {"weights": four, "targets": ["Linear"]} | ({"input_activations": four} if activations else {})
    algorithm = "NVFP4" if activations else "W4A16_NVFP4"
    return {"config_groups": {"group_0": group}, "ignore": list(ignore), "quant_algo": algorithm, "producer": PRODUCER, "quant_method": METHOD}


def other_files(ignore: Iterable[str], activations: bool) -> dict[str, Any]:
    """JSON files besides config.json."""
    algorithm = "NVFP4" if activations else "W4A16_NVFP4"
    body = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": nvfp4.GROUP, "exclude_modules": list(ignore)}
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": body}}
