"""ModelOpt's layout, as TensorRT-LLM and vLLM serve it: see :mod:`..readers.modelopt`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...formats import nvfp4
from ...tensors import NVFP4Tensor

METHOD = "modelopt"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # the version whose layout this is; readers look at the name


def tensors(name: str, weight: NVFP4Tensor, input_scale: Tensor | None) -> dict[str, Tensor]:
    """``name``: of the dense weight, ``X.weight``. The global scale is stored as it is."""
    out = {name: weight.qdata, f"{name}_scale": weight.scale, f"{name}_scale_2": weight.global_scale}
    return out if input_scale is None else out | {f"{name.removesuffix('weight')}input_scale": input_scale}


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
