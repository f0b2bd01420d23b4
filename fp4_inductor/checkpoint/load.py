"""Read a native checkpoint into a model. Everything is proved before the model is touched."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, bullet_names, list_names
from ..models import siblings
from ..models.convert import carry_over, replace_module, untie
from ..models.coverage import record
from ..models.plan import inspect, linear_kind
from ..models.preflight import check_device
from ..modules import BY_STORAGE, FP4Linear
from ..tensors.base import FP4Tensor
from . import manifest as mf
from .ahead import ahead
from .build import build_empty, values_lost
from .directory import Checkpoint, check_data, check_values, checked_names, join, open_checkpoint
from .experts import experts_in_place
from .safetensors_file import Entry, Reader

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load(model_or_factory: nn.Module | Callable[[], nn.Module], dir: str | os.PathLike, device: torch.device | str | None = None, strict: bool = True):
    """See :func:`fp4_inductor.load`."""
    where = check_device(device)
    checkpoint = open_checkpoint(dir)
    check_data(checkpoint, Path(dir))
    given = model_or_factory if isinstance(model_or_factory, nn.Module) else build_empty(model_or_factory).eval()
    model = getattr(given, "_orig_mod", given)  # torch.compile's wrapper
    compiled = model is not given
    lost = [name for name in values_lost(model) if name not in checkpoint.manifest.derived]
    if lost:
        raise CheckpointError(
            "the model has tensors on the meta device that are in no checkpoint",
            value=list_names(lost),
            limit="tensors with values",
            remedy="Pass a function that builds the model: load(lambda: Model(config), dir).",
        )
    with experts_in_place(model, checkpoint.manifest.experts) as model:
        slots = _match(model, checkpoint, strict)
        tensors = _read(model, checkpoint, slots, where)
    model = _install(model, checkpoint, slots, tensors)
    if where is not None:
        model.to(where)
    siblings.pack_model(model)
    record(model, siblings.annotated(inspect(model, checkpoint.manifest.errors, checkpoint.manifest.kept), model))
    return given if compiled else model


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slots:
    """``plain``: state_dict name -> (owner, attribute) of tensors assigned as they are; ``layers``: module -> its paths."""

    plain: dict[str, tuple[nn.Module, str]]
    fp4: dict[str, tuple[nn.Module, str]]
    layers: list[tuple[tuple[str, ...], nn.Module]]


def _match(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> _Slots:
    """Where every tensor goes, or one CheckpointError that lists all that does not fit."""
    manifest, entries = checkpoint.manifest, checkpoint.entries
    wrong: list[str] = []
    missing: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    taken: set[str] = set()
    paths: dict[int, list[str]] = {}
    for name, layer in manifest.layers.items():
        taken |= {join(name, part) for part in (*mf.STORAGES[layer.storage].names, "bias", "input_scale", "weight")}
        module = modules.get(name)
        problem = "the model has no such module" if module is None else _misfit(module, layer)
        if problem:
            wrong.append(f"{name}: {problem}")
        else:
            paths.setdefault(id(module), []).append(name)
    layers = [(tuple(names), modules[names[0]]) for names in paths.values()]

    plain: dict[str, tuple[nn.Module, str]] = {}
    fp4: dict[str, tuple[nn.Module, str]] = {}
    used = {n for n in entries if n in taken}
    for prefix, module in modules.items():
        for attribute, t in _tensors(module):
            name = join(prefix, attribute)
            derived = attribute in module._non_persistent_buffers_set
            if name in taken or (derived and name not in manifest.derived):
                continue
            if name in manifest.tensors:
                used |= {f"{name}.{part}" for part in _parts(manifest.tensors[name])}
                fp4[name] = (module, attribute)
                kept = manifest.tensors[name]
                *lead, n, k = mf.STORAGES[kept.storage].logical(entries[f"{name}.{_parts(kept)[0]}"].shape)
                shape = (*lead, k, n) if kept.transposed else (*lead, n, k)
                if tuple(t.shape) != shape:
                    wrong.append(f"{name}: shape {shape} in the checkpoint, {tuple(t.shape)} in the model")
            elif name in entries:
                used.add(name)
                plain[name] = (module, attribute)
                if isinstance(t, FP4Tensor):
                    wrong.append(f"{name}: dense in the checkpoint, a quantized tensor in the model")
                elif tuple(t.shape) != entries[name].shape:
                    wrong.append(f"{name}: shape {entries[name].shape} in the checkpoint, {tuple(t.shape)} in the model")
                elif entries[name].dtype != t.dtype and not (entries[name].dtype in _FLOATS and t.dtype in _FLOATS):
                    wrong.append(f"{name}: {entries[name].dtype} in the checkpoint, {t.dtype} in the model")
            else:
                missing.append(name)
                if not strict and t.device.type == "meta":
                    wrong.append(f"{name}: not in the checkpoint, and on the meta device in the model")
    extra = sorted(set(entries) - used - set(manifest.derived)) + sorted(set(manifest.tensors) - set(fp4))
    if strict:
        wrong += [f"{name}: not in the checkpoint" for name in missing] + [f"{name}: not in the model" for name in extra]
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not fit the model; nothing was changed:\n{bullet_names(wrong)}\n",
            value=f"{len(wrong)} differences",
            limit="the architecture that was saved",
            remedy="Build the model from the configuration it was saved with"
            + ("; strict=False forgives names that are missing on one side." if strict and (missing or extra) else "."),
        )
    if missing or extra:
        sides = {"not in the checkpoint": missing, "not in the model": extra}
        warnings.warn("load(strict=False): " + "; ".join(f"{side}: {list_names(names) or 'none'}" for side, names in sides.items()), stacklevel=5)
    return _Slots(plain, fp4, layers)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(attribute, tensor) of the parameters and buffers of this module only, as far as they are in a ``state_dict`` or could be."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from ((name, t) for name, t in module._buffers.items() if t is not None)


def _misfit(module: nn.Module, layer: mf.LayerEntry) -> str | None:
    """Why ``module`` cannot become the saved FP4Linear, or None."""
    if isinstance(module, FP4Linear):
        n, k = module.out_features, module.in_features
    else:
        kind = linear_kind(module)
        weight = module._parameters.get("weight")
        if kind not in ("linear", "transposed") or weight is None or weight.dim() != 2:
            return f"a quantized layer in the checkpoint, {type(module).__name__} in the model"
        n, k = weight.shape if kind == "linear" else weight.shape[::-1]
    if (n, k) != (layer.out_features, layer.in_features):
        return f"[{layer.out_features}, {layer.in_features}] in the checkpoint, [{n}, {k}] in the model"
    if (getattr(module, "bias", None) is not None) != layer.bias:
        return f"{'a' if layer.bias else 'no'} bias in the checkpoint, {'no' if layer.bias else 'a'} bias in the model"
    return None


def _read(model: nn.Module, checkpoint: Checkpoint, slots: _Slots, device: torch.device | None) -> dict[tuple[Entry, torch.device], Tensor]:
    """Every tensor on its device, read once and checked as it is read, however many names share it."""
    default = next((t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"), torch.device("cpu"))
    manifest, entries = checkpoint.manifest, checkpoint.entries
    checked = checked_names(checkpoint)
    wanted: dict[Entry, list[torch.device]] = {}
    for name, place in _places(slots, device, default, checkpoint).items():
        places = wanted.setdefault(entries[name], [])
        if place not in places:
            places.append(place)
    with Reader() as reader:

        def read(entry: Entry) -> Tensor:
            only = wanted[entry][0] if len(wanted[entry]) == 1 and wanted[entry][0].type == "cuda" else None
            t = reader.read(entry, manifest.files[entry.path.name].crc32.get(entry.name), only)
            if entry.name in checked:
                check_values(entry.name, t)
            return t

        # In the order of the files: sequential reads.
        in_order = sorted(wanted, key=lambda e: (e.path, e.start))
        found = ahead(in_order, read, lambda e: e.end - e.start)
        return {(entry, place): t.to(place) for entry, t in found for place in wanted[entry]}


def _places(slots: _Slots, device: torch.device | None, default: torch.device, checkpoint: Checkpoint) -> dict[str, torch.device]:
    def place(t: Tensor | None) -> torch.device:
        return device if device is not None else default if t is None or t.device.type == "meta" else t.device

    out = {name: place(getattr(module, attribute)) for name, (module, attribute) in slots.plain.items()}
    for name, (module, attribute) in slots.fp4.items():
        out |= {f"{name}.{part}": place(getattr(module, attribute)) for part in _parts(checkpoint.manifest.tensors[name])}
    for names, module in slots.layers:
        layer = checkpoint.manifest.layers[names[0]]
        own = (*_parts(layer), *(("bias",) if layer.bias else ()), *(("input_scale",) if layer.input_scale else ()))
        out |= {join(names[0], part): place(_weight_of(module)) for part in own}
    return out


def _install(model: nn.Module, checkpoint: Checkpoint, slots: _Slots, tensors: dict[tuple[Entry, torch.device], Tensor]) -> nn.Module:
    """Assign. Nothing here can fail for a reason that was not excluded before."""
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    by_entry: dict[Entry, list[Tensor]] = {}
    for (entry, _), t in tensors.items():
        by_entry.setdefault(entry, []).append(t)

    def get(name: str, like: Tensor | None = None) -> Tensor:
        found = by_entry[checkpoint.entries[name]]
        return next((t for t in found if like is not None and t.device == like.device), found[0])

    parameters: dict[int, nn.Parameter] = {}
    for name, (module, attribute) in slots.plain.items():
        old = getattr(module, attribute)
        t = get(name, old)
        if attribute in module._parameters:
            # One Parameter per stored tensor: names that were tied are tied again.
            t = parameters.setdefault(id(t), nn.Parameter(t, requires_grad=old.requires_grad and t.dtype.is_floating_point))
        setattr(module, attribute, t)
    for name, (module, attribute) in slots.fp4.items():
        kind = checkpoint.manifest.tensors[name]
        old = getattr(module, attribute)
        parts = [get(f"{name}.{part}", old) for part in _parts(kind)]
        weight = BY_STORAGE[kind.storage].TENSOR(*parts, kind.torch_dtype, kind.transposed)  # type: ignore[abstract]
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False) if attribute in module._parameters else weight)
    for names, module in slots.layers:
        layer = checkpoint.manifest.layers[names[0]]
        old = _weight_of(module)
        new = BY_STORAGE[layer.storage](layer.in_features, layer.out_features, dtype=layer.torch_dtype, device="meta", prefill=layer.prefill)
        new.take(tuple(get(join(names[0], part), old) for part in _parts(layer)))
        new.bias = get(join(names[0], "bias"), old) if layer.bias else None
        new.input_scale = get(join(names[0], "input_scale"), old) if layer.input_scale else None
        if owners[id(module._parameters.get("weight"))] > len(names):
            untie(model, names[0])
        carry_over(module, new)
        model = replace_module(model, names, new)
    return model


def _parts(entry: mf.LayerEntry | mf.TensorEntry) -> tuple[str, ...]:
    """Names of the weight's components."""
    return mf.STORAGES[entry.storage].names


def _weight_of(module: nn.Module) -> Tensor | None:
    """A tensor that lies where the layer's weight does."""
    return module.scale if isinstance(module, FP4Linear) else module._parameters["weight"]
