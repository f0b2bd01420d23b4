"""``export_pretrained``: a quantized model in the layout of another library, under the names its original checkpoint had."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...checkpoint.aside import as_path, publish, written_aside
from ...checkpoint.save import write_config
from ...checkpoint.shards import CONFIG, INDEX
from ...checkpoint.writers import LAYOUTS
from ...checkpoint.writers.fused import fused_families, share_scales
from ...errors import CheckpointError, ConfigError, FP4Error, list_names
from ...models.experts import ExpertsSpec, describe_experts
from ...modules import FP4ExpertWeight, FP8Linear, Sparse24Weight
from ...modules.packed import PackedWeight
from ...tensors import NVFP4Tensor
from ...tensors.base import FP4Tensor


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export_pretrained` wrote.

    Args:
        weights: how many are in FP4. rescaled: name on disk -> ``|W' - W| / |W|`` of a weight that was quantized again.
    """

    format: str
    directory: Path
    weights: int
    rescaled: dict[str, float]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.weights} weights in FP4, {self.format}: {self.directory}", *(f"note: {note}" for note in self.notes)])


def export_pretrained(model: nn.Module, dir: str | os.PathLike, format: str = "modelopt", max_shard_size: int | str = "5GB") -> ExportReport:
    """Write a quantized model for another library: vLLM, TensorRT-LLM, SGLang, compressed-tensors.

    Codes and block scales are written bit for bit, except where layers that a server fuses into one product (q/k/v, gate/up)
    have different global scales: all get the largest, and the others are quantized again under it.
    A global scale that has to divide (compressed-tensors) is the float32 whose bfloat16 weights are the same; a remark says
    where there is none (see ``formats/reciprocal.py``). Without input scales the checkpoint says that activations are not
    quantized. Files are written aside and renamed: nothing half-written is left, after Ctrl-C either.

    Args:
        model: a transformers model, quantized with :func:`fp4_inductor.quantize_model` or loaded here.
        dir: created if needed; must hold no weights yet.
        format: ``"modelopt"`` (``weight_scale_2``, hf_quant_config.json) or ``"compressed-tensors"`` (nvfp4-pack-quantized).
        max_shard_size: bytes, or text like ``"5GB"``.

    Returns:
        What was written, and the relative change of each weight that was quantized again; every remark is a warning too.

    Raises:
        ConfigError: not a transformers model, an unknown format, no path. CheckpointError: nothing in FP4, a layer that the layout
            cannot describe (padded K), weights there already, or the files cannot be written.
    """
    layout = LAYOUTS.get(format)
    if layout is None:
        raise ConfigError("unknown export format", value=repr(format), limit=sorted(LAYOUTS), remedy="fp4_inductor.save writes the native one.")
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "export_pretrained takes a transformers model",
            value=type(model).__name__,
            limit="PreTrainedModel",
            remedy="Its names and config.json are what a server reads; fp4_inductor.save writes any module.",
        )
    directory = as_path(dir, "dir")
    if any(directory.glob("*.safetensors")) or (directory / INDEX).exists():
        raise CheckpointError("the directory holds weights already", value=str(directory), limit="no *.safetensors", remedy="Choose an empty directory.")
    with torch.device("meta"):
        # How this architecture stores its experts. Some constructors need a torch.dtype in the config, where saving leaves its name.
        dense = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    state, inputs, eight = _dense_names(model, dense, hasattr(layout, "fp8_tensors"))
    original = original_names(dense, state)
    packed = {name: t for name, t in original.items() if isinstance(t, NVFP4Tensor)}
    if not packed:
        raise CheckpointError("nothing to export", value=f"{len(original)} tensors, none in FP4", limit=">= 1", remedy="Call quantize_model first.")
    activations = len(inputs) == sum(isinstance(t, NVFP4Tensor) for t in state.values())
    scales = _original_input_scales(dense, state, inputs) if activations else {}
    rescaled = share_scales(packed, scales)
    original |= packed
    tensors: dict[str, Tensor] = {}
    for name, t in original.items():
        tensors |= layout.tensors(name, t, scales.get(name)) if isinstance(t, NVFP4Tensor) else {name: t}
    in_fp8: dict[str, Any] = original_names(dense, {key: layer.scale[:1] for key, layer in eight.items()})
    for (name, scale), layer in zip(in_fp8.items(), eight.values(), strict=True):
        tensors |= layout.fp8_tensors(name, layer.qdata, scale, layer.input_scale)
    ignore = _ignored(model, dense, packed | in_fp8)
    algorithms = {name.removesuffix(".weight"): name in in_fp8 for name in (*packed, *in_fp8)} if in_fp8 else {}
    mixed = {"fp8": algorithms} if in_fp8 else {}
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": layout.config(ignore, activations, **mixed)}
    config["architectures"] = [type(model).__name__]
    with written_aside(directory, sum(t.numel() * t.element_size() for t in tensors.values())) as aside:
        _write(aside, tensors, {CONFIG: config, **layout.other_files(ignore, activations, **mixed)}, max_shard_size)
        if model.can_generate():
            write_config(model, aside, ("generation_config",))
        publish(aside, directory, CONFIG)
    notes = [remark] if (remark := layout.remark(packed)) else []
    if rescaled:
        worst = max(rescaled, key=rescaled.__getitem__)
        notes.append(
            f"{len(rescaled)} of {len(packed)} weights were quantized again under the global scale of the layers that a server fuses them with, "
            f'which changed them by up to {rescaled[worst]:.2%} ({worst}); NVFP4Config(siblings="shared") shares that scale from the dense weights'
        )
    whole = {name: tuple(t.shape) for name, t in original.items()}
    whole |= {name: (layer.out_features, layer.in_features) for name, layer in zip(in_fp8, eight.values(), strict=True)}
    if parts := [names for names in fused_families(whole) if 0 < sum(name in packed for name in names) < len(names)]:
        notes.append(
            f"{len(parts)} families of layers that servers fuse are in FP4 in part only ({list_names(n for names in parts for n in names)}): "
            "vLLM refuses that; quantize all or none"
        )
    if high := [name for name, m in model.named_modules() if isinstance(m, FP8Linear) and f"{name}.weight" not in eight]:
        notes.append(f"FP8 layers go out in high precision, for this layout has no scale per row: {list_names(high)}")
    for note in notes:
        warnings.warn(f"export_pretrained: {note}", stacklevel=2)
    return ExportReport(format, directory, len(packed), rescaled, tuple(notes))


def _dense_names(model: PreTrainedModel, dense: PreTrainedModel, with_fp8: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, FP8Linear]]:
    """The state_dict a dense model would have, its quantized weights as NVFP4Tensor; the input scales by weight name; FP8 layers with one scale, if they can be
    written, which are left out of the first."""
    state: dict[str, Tensor] = {}
    eight: dict[str, FP8Linear] = {}
    inputs: dict[str, Tensor] = {}
    packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedWeight)}
    for key, t in model.state_dict(keep_vars=True).items():
        owner, _, attribute = key.rpartition(".")
        if isinstance(t, FP4Tensor) and not isinstance(t, NVFP4Tensor):
            raise CheckpointError(f"{key} has no form in this layout", value=type(t).__name__, limit="NVFP4Tensor", remedy="Dequantize it first.")
        if owner not in packed:
            state[key] = t.detach()
        elif attribute == "bias":
            state[f"{owner}_bias" if isinstance(packed[owner], FP4ExpertWeight) else key] = t.detach()
    for name, module in packed.items():
        if isinstance(module, Sparse24Weight):
            raise CheckpointError(
                f"{name} is 2:4-sparse",
                value=type(module).__name__,
                limit="dense NVFP4",
                remedy="No other library reads 2:4 NVFP4 (compressed-tensors dropped sparse-24-bitmask): use fp4_inductor.save.",
            )
        if isinstance(module, FP8Linear):
            if with_fp8 and bool((module.scale == module.scale[0]).all()):
                eight[f"{name}.weight"] = module
            else:
                state[f"{name}.weight"] = module.dequantize()
            continue
        experts = isinstance(module, FP4ExpertWeight)
        key = name if experts else f"{name}.weight"
        shape = tuple(dense.get_parameter(key).shape)
        weight = NVFP4Tensor(module.qdata, module.scale, module.global_scale, module.dtype, transposed=experts and _is_transposed(dense, name))
        if tuple(weight.shape) not in (shape, shape[::-1] if len(shape) == 2 else shape):
            raise CheckpointError(
                f"{name} is padded to whole blocks, which this layout cannot say",
                value=shape,
                limit=f"{tuple(weight.shape)}: every K a multiple of 16",
                remedy="Leave this layer out when quantizing: ignore=[...].",
            )
        state[key] = weight
        if module.input_scale is not None:
            inputs[key] = module.input_scale
    tied: Mapping[str, str] = model.all_tied_weights_keys
    return {k: v for k, v in state.items() if k not in tied}, inputs, eight


def _is_transposed(dense: PreTrainedModel, name: str) -> bool:
    spec = describe_experts(dense.get_submodule(name.rpartition(".")[0]))
    return isinstance(spec, ExpertsSpec) and spec.transposed


def original_names(dense: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo what transformers renames, stacks and joins when it loads this architecture; experts that it leaves stacked come apart.

    Args:
        dense: the model on the meta device without packed layers: some rules look at its parameters.
    """
    try:
        found = revert_weight_conversion(dense, state)
    except FP4Error:
        raise
    except Exception as error:  # the rules are transformers' own code, and assume dense tensors
        raise _cannot(f"{type(error).__name__}: {str(error)[:200]}") from error
    before, after = (sum(t.numel() for t in tensors.values() if isinstance(t, NVFP4Tensor)) for tensors in (state, found))
    if before != after:
        raise _cannot(f"{before - after} weights left FP4")
    apart: dict[str, Tensor] = {}
    for name, t in found.items():
        apart |= _one_by_one(name, t) if isinstance(t, NVFP4Tensor) else {name: t}
    return apart


def _cannot(value: str) -> CheckpointError:
    return CheckpointError(
        "transformers' rules for the names of this architecture cannot be undone on packed weights",
        value=value,
        limit="rules that rename, stack, join or transpose",
        remedy="Use fp4_inductor.save or save_pretrained, which keep the model's own names.",
    )


def _one_by_one(name: str, weight: NVFP4Tensor) -> dict[str, Tensor]:
    """Experts ``[E, N, K]`` one by one, gate and up apart, as ModelOpt and llm-compressor write them; any other weight as it is."""
    owner, _, attribute = name.rpartition(".")
    if weight.dim() != 3 or weight.transposed or not owner.endswith("experts") or attribute not in ("gate_up_proj", "down_proj"):
        return {name: weight}
    out: dict[str, Tensor] = {}
    for e in range(weight.shape[0]):
        if attribute == "down_proj":
            out[f"{owner}.{e}.down_proj.weight"] = weight[e]
        else:
            half = weight.shape[1] // 2
            out |= {f"{owner}.{e}.gate_proj.weight": weight[e][:half], f"{owner}.{e}.up_proj.weight": weight[e][half:]}
    return out


def _original_input_scales(dense: PreTrainedModel, state: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The input scale of every weight by its name on disk: each travels through the same rules, in place of its weight's global scale."""
    carriers = {name: NVFP4Tensor(t.qdata, t.scale, inputs[name], t.logical_dtype, t.transposed) for name, t in state.items() if isinstance(t, NVFP4Tensor)}
    return {name: t.global_scale for name, t in original_names(dense, dict(carriers)).items() if isinstance(t, NVFP4Tensor)}


def _ignored(model: PreTrainedModel, dense: PreTrainedModel, packed: Mapping[str, Any]) -> list[str]:
    """Linear layers and embeddings that are not in FP4, by the names of the files."""
    left = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding, FP8Linear)) or type(module).__name__.endswith(("Router", "Gate"))
    }
    found = {key: getattr(module, "qdata" if isinstance(module, FP8Linear) else "weight", None) for key, module in left.items()}
    weights = {key: weight for key, weight in found.items() if isinstance(weight, Tensor)}
    return sorted(name.removesuffix(".weight") for name in original_names(dense, weights) if name not in packed)


def _write(aside: Path, tensors: dict[str, Tensor], files: Mapping[str, Any], max_shard_size: int | str) -> None:
    split = split_torch_state_dict_into_shards(tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({n: tensors[n].detach().cpu().contiguous().clone() for n in names}, aside / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for name, body in files.items():
        (aside / name).write_text(json.dumps(body, indent=2) + "\n")
