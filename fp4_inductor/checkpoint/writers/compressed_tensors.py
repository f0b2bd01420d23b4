"""compressed-tensors' ``nvfp4-pack-quantized``, as llm-compressor writes and vLLM serves it: see :mod:`..readers.compressed_tensors`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import list_names
from ...formats import nvfp4
from ...formats.reciprocal import is_exact, reciprocal_scale
from ...tensors import NVFP4Tensor
from ..readers.weight import unsupported

METHOD = "compressed-tensors"
FORMAT = "nvfp4-pack-quantized"


def tensors(name: str, weight: NVFP4Tensor, input_scale: Tensor | None) -> dict[str, Tensor]:
    """``name``: of the dense weight, ``X.weight``. The global scale divides there: see :mod:`fp4_inductor.formats.reciprocal`."""
    if weight.dim() != 2:
        raise unsupported(f"compressed-tensors: {name}", f"experts stacked {tuple(weight.shape)}", "one file entry per expert")
    whole = reciprocal_scale(weight.global_scale.cpu(), dividing=False).reshape(1)
    out = {f"{name}_packed": weight.qdata, f"{name}_scale": weight.scale, f"{name}_global_scale": whole}
    return out if input_scale is None else out | {f"{name.removesuffix('weight')}input_global_scale": input_scale.reciprocal().reshape(1)}


def remark(weights: Mapping[str, NVFP4Tensor]) -> str | None:
    """What is not exact about this layout for these weights, or None."""
    g = torch.stack([w.global_scale.cpu().reshape(()) for w in weights.values()]) if weights else torch.empty(0)
    odd = [n for n, exact in zip(weights, is_exact(g, reciprocal_scale(g, dividing=False)).tolist(), strict=True) if not exact]
    if not odd:
        return None
    return (
        f"{len(odd)} of {len(weights)} weights ({list_names(odd)}) have a global scale without an exact reciprocal: codes and scales are exact, but "
        "values that lie between two bfloat16 numbers may round the other way in compressed-tensors' arithmetic; the modelopt layout has no reciprocal"
    )


def config(ignore: Iterable[str], activations: bool) -> dict[str, Any]:
    """``quantization_config``. ``activations``: every layer has an input scale (W4A4)."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": nvfp4.GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": str(nvfp4.SCALE_DTYPE),
        "observer": "memoryless_minmax",
    }
    inputs = {**weights, "dynamic": "local", "observer": "static_minmax"} if activations else None
    group = {"format": FORMAT, "weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "format": FORMAT,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


def other_files(ignore: Iterable[str], activations: bool) -> dict[str, Any]:
    """JSON files besides config.json: none."""
    return {}
