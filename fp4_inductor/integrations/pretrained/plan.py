"""What loading a quantized checkpoint will do to a model, proved before a layer is replaced."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.readers import Found, StoredWeight, format_of, native
from ...checkpoint.safetensors_file import Entry
from ...checkpoint.shards import Shards
from ...config import Prefill, weight_only
from ...errors import CheckpointError, bullet_names, list_names
from ...formats import fp8, nvfp4
from ...models.convert import carry_over, replace_module
from ...models.experts import ExpertsSpec, describe_experts
from ...models.plan import linear_kind
from ...modules import BY_STORAGE, EXPERTS_BY_STORAGE, FP4Experts, FP4ExpertWeight, FP4Linear, FP8Linear
from ...modules.packed import PackedWeight
from ...tensors.base import FP4Tensor
from .names import Assembly, Source, assemble, shapes
from .parallel import is_parallel, shrink

# Some models initialise a child's weight from its parent (GPT-2's c_proj): a packed weight is never initialised, only read.
FP4Tensor._is_hf_initialized = True  # type: ignore[attr-defined]

_FORGIVES = "strict=False forgives names missing on one side"
_ROWS_PADDED = max(cls.storage().k_multiple for cls in EXPERTS_BY_STORAGE.values())  # fewer in each half of an expert's first product
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class LoadPlan:
    """What to read and where it goes.

    ``assemblies``: what this package reads, in the order of the files. ``replaced``: modules of experts that were replaced, by
    path. ``followers``: a packed weight -> the weights of other layers that are tied to it and that no file stores.
    ``dense``: names of the model's tensors that the checkpoint keeps in high precision.
    """

    assemblies: list[Assembly] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replaced: dict[str, nn.Module] = field(default_factory=dict)
    followers: dict[str, list[str]] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)


def make_load_plan(model: PreTrainedModel, shards: Shards, config: Mapping[str, Any], dtype: torch.dtype, strict: bool | None) -> LoadPlan:
    """Match everything on disk with the model, and prove that it fits.

    Args:
        strict: of tensors that are missing on one side. False forgives them. None forgives what differs because the checkpoint is of
            another task (a language model read as a classifier): what the model does not need, and a head that is not in the
            checkpoint, which transformers initialises. True forgives the former only.

    Raises:
        CheckpointError: names what is missing, unknown, of the wrong shape or dtype; the model is unchanged.
    """
    reader = format_of(config)
    found = reader.find(shards, config)
    if not any(weight.packed for weight in found.weights.values()):
        raise CheckpointError(
            "no quantized weight was found",
            value=f"{len(shards.entries)} tensors, quant_method {config.get('quant_method')}",
            limit="at least one",
            remedy="config.json and the weights are of different models: download the checkpoint again.",
        )
    dense = {name: e for name, e in shards.entries.items() if name not in found.used and name not in found.ignored}
    if twice := sorted(dense.keys() & found.weights.keys()):
        raise CheckpointError(
            f"{twice[0]} is stored twice, dense and quantized", value=f"{len(twice)} weights", limit="one form of each", remedy="Download the checkpoint again."
        )
    assemblies, homeless = assemble(model, found.weights, dense, as_saved=reader is native)
    wrong, made = _check(model, assemblies, found, dtype)
    missing = _missing(model, made | set(config.get("dense", ())))
    unknown = [name for name in homeless if not _matches(name, model._keys_to_ignore_on_load_unexpected)]
    named = model.config.architectures
    other_task = isinstance(named, list) and bool(named) and type(model).__name__ not in named
    if strict is not False:
        wrong += [f"{name}: not in the checkpoint" for name in missing if strict or not other_task or not _is_of_a_task(model, name)]
        wrong += [f"{name}: not in the model" for name in unknown if not other_task]
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}; nothing was changed:\n{bullet_names(wrong)}\n",
            value=f"{len(wrong)} differences",
            limit="the architecture of config.json",
            remedy="Use the config.json that came with the weights" + (f"; {_FORGIVES}." if missing or unknown else "."),
        )
    notes = found.notes + [f"{reason}: {sum(r == reason for r in found.ignored.values())} tensors ignored" for reason in sorted(set(found.ignored.values()))]
    if missing:
        notes.append(f"not in the checkpoint, newly initialized: {list_names(missing)}")
        warnings.warn(f"{type(model).__name__}: {notes[-1]}", stacklevel=2)
    notes += [f"in the checkpoint but not in the model: {list_names(unknown)}"] if unknown else []
    ours = [a for a in assemblies if a.packed or _is_expert_bias(model, a.target, assemblies)]
    ours.sort(key=lambda a: min((p.path.name, p.start) for _, _, source in a.sources for p in parts_of(source)))
    return LoadPlan(ours, notes, dense=[a.target for a in assemblies if not a.packed])


def parts_of(source: Source) -> tuple[Entry, ...]:
    """What is on disk of ``source``."""
    return source.parts if isinstance(source, StoredWeight) else (source,)


def _is_expert_bias(model: PreTrainedModel, name: str, assemblies: list[Assembly]) -> bool:
    """FP4Experts hold their biases themselves, under other names than the module they replace."""
    owner, _, attribute = name.rpartition(".")
    spec = describe_experts(model.get_submodule(owner)) if attribute.endswith("_bias") else None
    if not isinstance(spec, ExpertsSpec) or attribute not in spec.parameters:
        return False
    return any(a.packed and a.target.startswith(f"{owner}.") for a in assemblies)


def _padded_bias(model: PreTrainedModel, name: str, t: Tensor, old: Tensor, assemblies: list[Assembly]) -> bool:
    """The bias of experts whose rows were padded when they were quantized here."""
    if t.dim() != 2 or old.dim() != 2 or t.shape[0] != old.shape[0] or not _is_expert_bias(model, name, assemblies):
        return False
    return 0 < t.shape[1] - old.shape[1] < 2 * _ROWS_PADDED


def _check(model: PreTrainedModel, assemblies: list[Assembly], found: Found, dtype: torch.dtype) -> tuple[list[str], set[str]]:
    """(what does not fit, the model's names that are provided)."""
    wrong: list[str] = []
    made: set[str] = set()
    known = model.state_dict()
    packed = {item.target for item in assemblies if item.packed}
    stored = {item.target for item in assemblies}
    for item in assemblies:
        for name, t in shapes(item, model, dtype).items():
            made.add(name)
            old = known.get(name)
            if old is None:
                wrong.append(f"{name}: not in the model")
            elif item.packed:
                wrong += _misfit(model, name, t, old, packed) or _cannot_follow(model, name, t, stored - packed)
            elif tuple(t.shape) != tuple(old.shape) and not _padded_bias(model, name, t, old, assemblies):
                wrong.append(f"{name}: shape {tuple(t.shape)} in the checkpoint, {tuple(old.shape)} in the model")
            elif t.dtype != old.dtype and not (t.dtype in _FLOATS and old.dtype in _FLOATS):
                wrong.append(f"{name}: {t.dtype} in the checkpoint, {old.dtype} in the model")
            elif t.dtype.itemsize == 1 and t.dtype.is_floating_point:
                wrong.append(f"{name}: {t.dtype} without a scale that this format describes")
    return wrong, made


def _misfit(model: PreTrainedModel, name: str, t: Tensor, old: Tensor, packed: set[str]) -> list[str]:
    if t.dtype == fp8.DTYPE:
        return _misfit_fp8(model, name, t, old)
    if not isinstance(t, FP4Tensor):
        return [f"{name}: the model's conversion rules rearrange it in a way that packed weights cannot follow"]
    if t.STORAGE is not nvfp4.STORAGE and is_parallel(model):
        return [f"{name}: {t.STORAGE.name} in the checkpoint, which tensor parallelism does not divide yet"]
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    kind = linear_kind(module)
    experts = describe_experts(module) if t.dim() == 3 else None
    if kind in ("linear", "transposed") and attribute == "weight":
        swapped, rows = kind == "transposed", False
    elif isinstance(experts, ExpertsSpec) and attribute in (experts.first, "down_proj"):
        swapped, rows = experts.transposed, attribute == experts.first
        other = "down_proj" if rows else experts.first
        if f"{owner}.{other}" not in packed:
            return [f"{name}: quantized in the checkpoint, but {owner}.{other} is not"]
    else:
        why = experts if isinstance(experts, str) else f"a parameter of {type(module).__name__} in the model"
        return [f"{name}: quantized in the checkpoint, {why}"]
    *lead, n, k = (*old.shape[:-2], old.shape[-1], old.shape[-2]) if swapped else old.shape
    *stored_lead, stored_n, stored_k = t.STORAGE.logical(t.parts()[0].shape)
    if rows and isinstance(experts, ExpertsSpec):
        lead = [lead[0] - experts.identity]  # nothing is stored for experts that return their input
    # K padded to whole blocks, and the rows of an expert's first product with it: only models quantized here are.
    unit = t.STORAGE.k_multiple
    fits = stored_k in (k, k + -k % unit) and (stored_n == n or (rows and stored_n > n and stored_n - n < 2 * _ROWS_PADDED))
    if stored_lead != lead or not fits:
        return [f"{name}: shape {(*stored_lead, stored_n, stored_k)} in the checkpoint, {(*lead, n, k)} in the model"]
    return []


def tied_to(model: PreTrainedModel, name: str) -> list[str]:
    """The other names of the weight ``name``: transformers ties the Parameters of blocks that several layers share."""
    tied = model.all_tied_weights_keys  # {follower: source}
    source = tied.get(name, name)
    return [other for other in (source, *(k for k, v in tied.items() if v == source)) if other != name]


def _cannot_follow(model: PreTrainedModel, name: str, t: Tensor, dense: set[str]) -> list[str]:
    """Why the layers whose weights are tied to the packed weight ``name`` cannot share it; empty if they can, or if there are none."""
    others = tied_to(model, name)
    kind = linear_kind(model.get_submodule(name.rpartition(".")[0]))
    for other in others:
        if other in dense:
            return [f"{name}: quantized in the checkpoint, tied in the model to {other}, which is stored dense"]
        if kind not in ("linear", "transposed") or not other.endswith(".weight") or linear_kind(model.get_submodule(other.removesuffix(".weight"))) != kind:
            return [f"{name}: quantized in the checkpoint, tied in the model to {other}, which is no such layer"]
    if others and is_parallel(model):
        return [f"{name}: tied to {others[0]}; tensor parallelism does not divide a shared weight yet"]
    return []


def _misfit_fp8(model: PreTrainedModel, name: str, t: Tensor, old: Tensor) -> list[str]:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if linear_kind(module) != "linear" or attribute != "weight":
        return [f"{name}: FP8 in the checkpoint, which only linear layers can be here; a parameter of {type(module).__name__} in the model"]
    if is_parallel(model):
        return [f"{name}: FP8 in the checkpoint, which tensor parallelism does not divide yet"]
    if tuple(t.shape) != tuple(old.shape):
        return [f"{name}: shape {tuple(t.shape)} in the checkpoint, {tuple(old.shape)} in the model"]
    return []


def _missing(model: PreTrainedModel, made: set[str]) -> list[str]:
    tied = model.all_tied_weights_keys  # {follower: source}
    provided = made | {k for k, v in tied.items() if v in made} | {v for k, v in tied.items() if k in made}
    return [name for name in model.state_dict() if name not in provided and not _matches(name, model._keys_to_ignore_on_load_missing)]


def _is_of_a_task(model: PreTrainedModel, name: str) -> bool:
    """Does the tensor ``name`` belong to a head, or to a pooler, which the models of other tasks do not have?"""
    prefix = model.base_model_prefix
    inside = name.removeprefix(f"{prefix}.")
    has_base = bool(prefix) and hasattr(model, prefix)
    return (has_base and inside == name) or "pool" in inside.split(".")[0]


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())


def install_empty(model: PreTrainedModel, plan: LoadPlan, dtype: torch.dtype, prefill: Prefill) -> None:
    """Put modules without values in place of all that will be quantized. Transformers moves their buffers to their devices."""
    made = {name: t for item in plan.assemblies if item.packed for name, t in shapes(item, model, dtype).items()}
    for name, t in made.items():
        owner, _, attribute = name.rpartition(".")
        old = model.get_submodule(owner)
        if linear_kind(old) is not None:
            weight = old.get_parameter("weight")
            n, k = weight.shape if linear_kind(old) == "linear" else weight.shape[::-1]
            layer = BY_STORAGE[t.STORAGE.name] if isinstance(t, FP4Tensor) else FP8Linear
            path = weight_only(prefill) if layer is not FP4Linear or old is model.get_output_embeddings() else prefill
            plan.followers[name] = [other for other in tied_to(model, name) if other not in made]
            for at in (owner, *(other.rpartition(".")[0] for other in plan.followers[name])):
                module = model.get_submodule(at)
                _replace(model, at, module, layer(k, n, bias=module.bias is not None, dtype=dtype, device="meta", prefill=path))
            _untie(model, name, plan.followers[name])
        elif attribute == "down_proj":
            spec = describe_experts(old)
            if isinstance(spec, ExpertsSpec):
                first = _empty_experts(old, spec, spec.first, cast(FP4Tensor, made[f"{owner}.{spec.first}"]), dtype)
                down = _empty_experts(old, spec, "down_proj", cast(FP4Tensor, t), dtype)
                plan.replaced[owner] = old
                new = FP4Experts(first, down, spec.activation, first_name=spec.first, dense=spec.dense, identity=spec.identity, prefill=weight_only(prefill))
                _replace(model, owner, old, new)


def _untie(model: PreTrainedModel, name: str, followers: list[str]) -> None:
    """Leave the weights and biases of packed layers to :func:`..fill.fill`: transformers ties Parameters, which they are not."""
    for other in (name, *followers):
        owner = other.rpartition(".")[0]
        for key in (other, f"{owner}.bias"):
            model.all_tied_weights_keys.pop(key, None)
        if other != name:
            module = cast(PackedWeight, model.get_submodule(owner))
            shrink(module)
            module._non_persistent_buffers_set |= {"bias"}


def _empty_experts(module: nn.Module, spec: ExpertsSpec, name: str, t: FP4Tensor, dtype: torch.dtype) -> FP4ExpertWeight:
    e, (_, *dims) = module.get_parameter("down_proj").shape[0], module.get_parameter(name).shape
    rows, columns = reversed(dims) if spec.transposed else dims
    _, n, k = t.STORAGE.logical(t.parts()[0].shape)
    return EXPERTS_BY_STORAGE[t.STORAGE.name](e, n, k, rows=rows, columns=columns, bias=spec.bias, dtype=dtype, device="meta")


def _replace(model: PreTrainedModel, path: str, old: nn.Module, new: nn.Module) -> None:
    parallel = is_parallel(model)
    for module in new.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]
        if isinstance(module, PackedWeight):
            hide(module)
            if parallel:
                shrink(module)
        if isinstance(module, FP4ExpertWeight):
            module.in_features = module.columns  # type: ignore[assignment]  # transformers looks for it before it divides rows; nothing calls this module
        if isinstance(module, FP4Linear):
            module._hf_quantized_needs_local_tp = True  # type: ignore[assignment]  # transformers: inputs and weights of this one are plain tensors
    carry_over(old, new)
    replace_module(model, (path,), new)


def hide(module: PackedWeight) -> None:
    """Keep the packed buffers out of the state_dict: transformers would look for them on disk, and initialise them."""
    module._non_persistent_buffers_set |= {*_parts(module), "bias"} if isinstance(module, FP4ExpertWeight) else {*_parts(module)}


def unhide(module: PackedWeight) -> None:
    module._non_persistent_buffers_set -= {*_parts(module), "bias"}


def _parts(module: PackedWeight) -> tuple[str, ...]:
    return module.storage().names
