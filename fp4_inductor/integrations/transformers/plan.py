"""What loading a quantized checkpoint will do to a model, proved before a layer is replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.readers import FORMATS, Format, Found
from ...checkpoint.shards import Shards
from ...errors import CheckpointError
from ...formats import nvfp4
from ...models.convert import carry_over, replace_module
from ...models.plan import linear_kind
from ...modules import FP4Linear
from ...tensors import NVFP4Tensor
from .names import Assembly, assemble, shapes

_SHOWN = 20
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class LoadPlan:
    """``assemblies``: the quantized ones, in the order of the files. ``notes``: for the report."""

    assemblies: list[Assembly] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def format_of(config: Mapping[str, Any] | None) -> Format:
    """The reader of a ``quantization_config``, checked for variants it cannot read."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and (method is None and _names_modelopt(config)):
        method = "modelopt"
    reader = FORMATS.get(str(getattr(method, "value", method)))
    if config is None or reader is None:
        raise CheckpointError(
            "the checkpoint is not quantized, or in a format without a reader",
            value=f"quant_method {method!r}",
            limit=sorted(FORMATS),
            remedy="fp4_inductor.quantize_model quantizes a loaded dense model; other formats: load them with the library that wrote them.",
        )
    reader.check(config)
    return reader


def _names_modelopt(config: Mapping[str, Any]) -> bool:
    producer = config.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def make_load_plan(model: PreTrainedModel, shards: Shards, config: Mapping[str, Any], dtype: torch.dtype, strict: bool) -> LoadPlan:
    """Match everything on disk with the model, and prove that it fits.

    Raises:
        CheckpointError: names what is missing, unknown, of the wrong shape or dtype; the model is unchanged.
    """
    found = format_of(config).find(shards, config)
    if not found.weights:
        raise CheckpointError(
            "no quantized weight was found",
            value=f"{len(shards.entries)} tensors, quant_method {config.get('quant_method')}",
            limit="at least one",
            remedy="config.json and the weights are of different models: download the checkpoint again.",
        )
    dense = {name: e for name, e in shards.entries.items() if name not in found.used and name not in found.ignored}
    assemblies, homeless = assemble(model, found.weights, dense)
    wrong, made = _check(model, assemblies, found, dtype)
    missing = _missing(model, made)
    unknown = [name for name in homeless if not _matches(name, model._keys_to_ignore_on_load_unexpected)]
    if strict:
        wrong += [f"{name}: not in the checkpoint" for name in missing] + [f"{name}: not in the model" for name in unknown]
    if wrong:
        more = f"\n  - ... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        listed = "\n".join(f"  - {w}" for w in wrong[:_SHOWN])
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}; nothing was changed:\n{listed}{more}\n",
            value=f"{len(wrong)} differences",
            limit="the architecture of config.json",
            remedy="Use the config.json that came with the weights" + ("; strict=False forgives names missing on one side." if missing or unknown else "."),
        )
    notes = [f"{reason}: {sum(r == reason for r in found.ignored.values())} tensors ignored" for reason in sorted(set(found.ignored.values()))]
    notes += [f"not in the checkpoint: {', '.join(missing[:_SHOWN])}"] if missing else []
    notes += [f"in the checkpoint but not in the model: {', '.join(unknown[:_SHOWN])}"] if unknown else []
    packed = [a for a in assemblies if a.packed]
    packed.sort(key=lambda a: min((p.path.name, p.start) for w in a.weights for p in w.parts))
    return LoadPlan(packed, notes)


def _check(model: PreTrainedModel, assemblies: list[Assembly], found: Found, dtype: torch.dtype) -> tuple[list[str], set[str]]:
    """(what does not fit, the model's names that are provided)."""
    wrong: list[str] = []
    made: set[str] = set()
    known = model.state_dict()
    for item in assemblies:
        for name, t in shapes(item, model, dtype).items():
            made.add(name)
            old = known.get(name)
            if old is None:
                wrong.append(f"{name}: not in the model")
            elif item.packed:
                wrong += _misfit(model, name, t, old)
            elif tuple(t.shape) != tuple(old.shape):
                wrong.append(f"{name}: shape {tuple(t.shape)} in the checkpoint, {tuple(old.shape)} in the model")
            elif t.dtype != old.dtype and not (t.dtype in _FLOATS and old.dtype in _FLOATS):
                wrong.append(f"{name}: {t.dtype} in the checkpoint, {old.dtype} in the model")
            elif t.dtype.itemsize == 1 and t.dtype.is_floating_point:
                wrong.append(f"{name}: {t.dtype} without a scale that this format describes")
    return wrong, made


def _misfit(model: PreTrainedModel, name: str, t: Tensor, old: Tensor) -> list[str]:
    if not isinstance(t, NVFP4Tensor):
        return [f"{name}: the model's conversion rules rearrange it in a way that packed weights cannot follow"]
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    kind = linear_kind(module)
    shape = tuple(old.shape) if kind != "transposed" else tuple(old.shape[::-1])
    padded = (*shape[:-1], shape[-1] + -shape[-1] % nvfp4.GROUP)  # as FP4Linear pads K
    if tuple(t.shape) not in (shape, padded):
        return [f"{name}: shape {tuple(t.shape)} in the checkpoint, {shape} in the model"]
    if kind in ("linear", "transposed") and attribute == "weight":
        tied = [n for n in (*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()) if n == name]
        return [f"{name}: quantized in the checkpoint, tied to another weight in the model"] if tied else []
    return [f"{name}: quantized in the checkpoint, a parameter of {type(module).__name__} in the model"]


def _missing(model: PreTrainedModel, made: set[str]) -> list[str]:
    tied = model.all_tied_weights_keys  # {follower: source}
    provided = made | {k for k, v in tied.items() if v in made} | {v for k, v in tied.items() if k in made}
    return [name for name in model.state_dict() if name not in provided and not _matches(name, model._keys_to_ignore_on_load_missing)]


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())


def install_empty(model: PreTrainedModel, plan: LoadPlan, dtype: torch.dtype, large_m: str) -> None:
    """Put a layer without values in place of each that will be quantized. Transformers moves their buffers to their devices."""
    for item in plan.assemblies:
        for name in shapes(item, model, dtype):
            owner = name.rpartition(".")[0]
            old = model.get_submodule(owner)
            if isinstance(old, FP4Linear):
                continue
            weight = old.get_parameter("weight")
            n, k = weight.shape if linear_kind(old) == "linear" else weight.shape[::-1]
            new = FP4Linear(k, n, bias=old.bias is not None, dtype=dtype, device="meta", large_m=large_m)
            hide(new)
            carry_over(old, new)
            replace_module(model, (owner,), new)


def hide(layer: nn.Module) -> None:
    """Keep the packed buffers out of the state_dict: transformers would look for them on disk, and initialise them."""
    layer._non_persistent_buffers_set |= set(NVFP4Tensor.PARTS)
    layer._is_hf_initialized = True  # type: ignore[assignment]


def unhide(layer: nn.Module) -> None:
    layer._non_persistent_buffers_set -= set(NVFP4Tensor.PARTS)
