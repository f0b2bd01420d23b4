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

from ..errors import CheckpointError, SparsityError
from ..formats import nvfp4, sparse24
from ..formats.storage import Storage
from ..integrations import describe_for_saving
from ..integrations.transformers import use_experts_backend
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
from .experts import experts_in_place
from .safetensors_file import Entry, Header, Reader, data_crc32, parse_json, read_header
from .shards import check_index

_SHOWN = 20
_DAMAGED = "The weights are damaged: copy the checkpoint again, or quantize the model again."
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_E4M3_MAX_BYTE = 0x7E  # 0x7F is NaN; from 0x80 on the sign bit is set, which no scale has


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose structure is proved: ``entries`` has every tensor, aliases included."""

    manifest: mf.Manifest
    entries: dict[str, Entry]


def load(model_or_factory: nn.Module | Callable[[], nn.Module], dir: str | os.PathLike, device: torch.device | str | None = None, strict: bool = True):
    """Read a checkpoint written by :func:`fp4_inductor.save`, bit for bit.

    Args:
        model_or_factory: a module of the saved architecture (dense, already quantized, or on the meta device), changed
            in place; or a function without arguments that makes one. The function's Parameters are never allocated (it
            may be called a second time if its constructor needs their values), and the model it makes is returned in
            eval mode. Saved dtypes win over the model's.
        dir: the checkpoint.
        device: where the model goes; None: where its tensors are (the CPU for meta tensors).
        strict: False lets tensors be missing from the checkpoint (the model keeps its own) or from the model (ignored),
            with a warning that names them. Damage and wrong shapes are errors in any case.

    Returns:
        The model; ``fp4_inductor.report`` knows the relative errors that were recorded when it was quantized. Siblings
        are packed as ``quantize_model`` does it.

    Raises:
        CheckpointError: damaged, inconsistent, incomplete, or of another model; the model is unchanged.
    """
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
            value=", ".join(lost[:_SHOWN]),
            limit="tensors with values",
            remedy="Pass a function that builds the model: load(lambda: Model(config), dir).",
        )
    with experts_in_place(model, checkpoint.manifest.experts) as model:
        slots = _match(model, checkpoint, strict)
        tensors = _read(model, checkpoint, slots, where)
    model = _install(model, checkpoint, slots, tensors)
    if where is not None:
        model.to(where)
    use_experts_backend(model)
    large_m = [e.large_m for e in checkpoint.manifest.layers.values()] + [e.large_m for e in checkpoint.manifest.experts.values()]
    describe_for_saving(model, large_m[0] if large_m else "auto")
    siblings.pack_model(model)
    record(model, siblings.annotated(inspect(model, checkpoint.manifest.errors, checkpoint.manifest.kept), model))
    return given if compiled else model


# --- the directory -----------------------------------------------------------------------------------------------


def open_checkpoint(dir: str | os.PathLike) -> Checkpoint:
    """Prove the structure of a checkpoint directory without reading a weight."""
    directory = Path(dir)
    manifest = mf.read(directory)
    if not manifest.files:
        raise CheckpointError(f"{mf.FILE} lists no file", value=0, limit=">= 1", remedy=mf.REWRITE)
    headers = {name: read_header(directory / name) for name in manifest.files}
    for name, header in headers.items():
        want = manifest.files[name]
        if header.size != want.bytes:
            raise CheckpointError(f"{name} has another size than when it was saved", value=header.size, limit=f"{want.bytes} bytes", remedy=mf.MIXED)
        if header.digest != want.header_sha256:
            raise CheckpointError(f"{name}: the header was altered since it was saved", value=header.digest, limit=want.header_sha256, remedy=mf.MIXED)
        if want.data_crc32 is None and set(want.crc32) != set(header.entries):
            odd = sorted(set(want.crc32) ^ set(header.entries))
            raise CheckpointError(f"{mf.FILE}: crc32 does not list the tensors of {name}", value=odd[:_SHOWN], limit="each of them", remedy=mf.REWRITE)
    entries: dict[str, Entry] = {}
    for file, header in headers.items():
        for name, entry in header.entries.items():
            if name in entries:
                raise CheckpointError(f"{name} is in two shards", value=f"{entries[name].path.name}, {file}", limit="one", remedy=mf.REWRITE)
            entries[name] = entry
    _check_index(directory, headers, entries)
    for alias, name in manifest.aliases.items():
        if alias in entries or name not in _stored_names(headers):
            raise CheckpointError(
                f"{mf.FILE}: alias {alias} is not valid",
                value=name,
                limit="a stored tensor under a name that is not stored itself",
                remedy=mf.REWRITE,
            )
    entries |= {alias: entries[name] for alias, name in manifest.aliases.items()}
    absent = sorted(set(manifest.derived) - set(entries))
    if absent:
        raise CheckpointError(
            f"{mf.FILE} lists buffers that are not stored", value=", ".join(absent[:_SHOWN]), limit="names of stored tensors", remedy=mf.REWRITE
        )
    _check_parts(manifest, entries)
    return Checkpoint(manifest, entries)


def _stored_names(headers: dict[str, Header]) -> set[str]:
    return {name for header in headers.values() for name in header.entries}


def _check_index(directory: Path, headers: dict[str, Header], entries: dict[str, Entry]) -> None:
    if len(headers) == 1 and not (directory / mf.INDEX).exists():
        return
    index = parse_json(mf.read_small(directory / mf.INDEX), mf.INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{mf.INDEX} has no weight_map", value=type(weight_map).__name__, limit="an object", remedy=mf.MIXED)
    for file in weight_map.values():
        mf.check_file_name(file)
    check_index(mf.INDEX, weight_map, entries, mf.MIXED)


def _check_parts(manifest: mf.Manifest, entries: dict[str, Entry]) -> None:
    for name, layer in manifest.layers.items():
        storage = mf.STORAGES[layer.storage]
        k = layer.in_features + -layer.in_features % storage.k_multiple
        _check_matrix(name, entries, storage, (layer.out_features, k))
        bias = entries.get(_join(name, "bias"))
        if (bias is not None) != layer.bias:
            there, wanted = ("absent", "present") if bias is None else ("present", "absent")
            raise CheckpointError(f"{name}.bias is not as {mf.FILE} says", value=there, limit=wanted, remedy=mf.REWRITE)
        if bias is not None and (bias.shape != (layer.out_features,) or bias.dtype not in nvfp4.HIGH_PRECISION):
            raise CheckpointError(
                f"{name}.bias has the wrong shape or dtype",
                value=f"{bias.dtype} {bias.shape}",
                limit=f"({layer.out_features},) in {', '.join(mf.DTYPE_NAMES)}",
                remedy=mf.REWRITE,
            )
        of_input = entries.get(_join(name, "input_scale"))
        if (of_input is not None) != layer.input_scale or (of_input is not None and (of_input.shape != () or of_input.dtype != torch.float32)):
            there = "absent" if of_input is None else f"{of_input.dtype} {of_input.shape}"
            limit = "float32 ()" if layer.input_scale else "absent"
            raise CheckpointError(f"{name}.input_scale is not as {mf.FILE} says", value=there, limit=limit, remedy=mf.REWRITE)
    for name, experts in manifest.experts.items():
        blank = experts.module()
        for part, weight in ((experts.first, blank.first), ("down_proj", blank.down_proj)):
            _check_matrix(_join(name, part), entries, nvfp4.STORAGE, tuple(weight.weight.shape))
            of_input = entries.get(_join(name, f"{part}.input_scale"))
            if (weight.input_scale is not None) != (of_input is not None) or (
                of_input and (of_input.shape, of_input.dtype) != ((len(weight.global_scale),), torch.float32)
            ):
                there = "absent" if of_input is None else f"{of_input.dtype} {of_input.shape}"
                raise CheckpointError(f"{name}.{part}.input_scale is not as {mf.FILE} says", value=there, limit=experts.input_scales, remedy=mf.REWRITE)
    for name, kept in manifest.tensors.items():
        storage = mf.STORAGES[kept.storage]
        first = entries.get(f"{name}.{storage.parts[0].name}")
        _check_matrix(name, entries, storage, None if first is None or len(first.shape) < 2 else storage.logical(first.shape))


def _check_matrix(name: str, entries: dict[str, Entry], storage: Storage, shape: tuple[int, ...] | None) -> None:
    """The components of one weight ``[..., N, K]`` exist with the right shapes and dtypes."""
    if shape is None or shape[-1] % storage.k_multiple:
        part = storage.parts[0]
        raise CheckpointError(
            f"{name}.{part.name} is missing or no matrix of whole blocks",
            value="no matrix" if shape is None else f"K = {shape[-1]}",
            limit=f"[..., N, K/{part.k}] with K % {storage.k_multiple} == 0",
            remedy=mf.REWRITE,
        )
    for part, part_shape in zip(storage.parts, storage.shapes(shape).values(), strict=True):
        entry = entries.get(_join(name, part.name))
        if entry is None:
            raise CheckpointError(f"{_join(name, part.name)} is missing", value="no such tensor", limit=f"{part.dtype} {part_shape}", remedy=mf.REWRITE)
        if entry.shape != part_shape or entry.dtype != part.dtype:
            raise CheckpointError(
                f"{_join(name, part.name)} has the wrong shape or dtype",
                value=f"{entry.dtype} {entry.shape}",
                limit=f"{part.dtype} {part_shape}",
                remedy=mf.REWRITE,
            )


def check_data(checkpoint: Checkpoint, directory: Path) -> None:
    """Files of version 1: every byte is the one that was saved. Later versions have a sum for each tensor, checked as it is read."""
    for name, entry in checkpoint.manifest.files.items():
        if entry.data_crc32 is not None and (crc := data_crc32(directory / name)) != entry.data_crc32:
            raise CheckpointError(
                f"{name}: the tensors were altered since they were saved", value=f"CRC-32 {crc:08x}", limit=f"{entry.data_crc32:08x}", remedy=_DAMAGED
            )


def check_values(name: str, t: Tensor) -> None:
    """A block scale is not NaN or negative, a global scale is finite and positive, 2:4 metadata is legal. ``name``: of the tensor."""
    if t.dtype == nvfp4.SCALE_DTYPE:
        largest = int(t.view(torch.uint8).max()) if t.numel() else 0
        if largest > _E4M3_MAX_BYTE:
            raise CheckpointError(f"{name} holds a NaN or negative scale", value=hex(largest), limit="0x00 .. 0x7e", remedy=_DAMAGED)
        return
    if t.dtype == torch.uint8:
        try:
            sparse24.validate_meta(t)
        except SparsityError as error:
            raise CheckpointError(f"{name}: {error.what}", value=error.value, limit=error.limit, remedy=_DAMAGED) from error
        return
    bad = t[~(torch.isfinite(t) & (t > 0))]
    if bad.numel():
        raise CheckpointError(f"{name} must be finite and positive", value=bad[:4].tolist(), limit="finite and > 0", remedy=_DAMAGED)


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
        taken |= {_join(name, part) for part in (*mf.STORAGES[layer.storage].names, "bias", "input_scale", "weight")}
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
            name = _join(prefix, attribute)
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
        more = f"\n  - ... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        listed = "\n".join(f"  - {w}" for w in wrong[:_SHOWN])
        raise CheckpointError(
            f"the checkpoint does not fit the model; nothing was changed:\n{listed}{more}\n",
            value=f"{len(wrong)} differences",
            limit="the architecture that was saved",
            remedy="Build the model from the configuration it was saved with"
            + ("; strict=False forgives names that are missing on one side." if strict and (missing or extra) else "."),
        )
    if missing or extra:
        warnings.warn(f"load(strict=False): not in the checkpoint: {missing}; not in the model: {extra}", stacklevel=3)
    return _Slots(plain, fp4, layers)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(attribute, tensor) of the parameters and buffers of this module only."""
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None:
            yield name, t


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
    experts = [_join(name, part) for name, e in manifest.experts.items() for part in (e.first, "down_proj")]
    checked = {_join(name, part) for name in (*manifest.layers, *experts, *manifest.tensors) for part in ("scale", "global_scale", "input_scale")}
    sparse = [name for weights in (manifest.layers, manifest.tensors) for name, e in weights.items() if e.storage == sparse24.NAME]
    checked |= {_join(name, "meta") for name in sparse}
    checked = {entries[name].name for name in checked if name in entries}  # an alias is checked under its own name
    wanted: dict[Entry, list[torch.device]] = {}
    for name, place in _places(slots, device, default, checkpoint).items():
        places = wanted.setdefault(entries[name], [])
        if place not in places:
            places.append(place)
    with Reader() as reader:

        def read(entry: Entry) -> Tensor:
            t = reader.read(entry, manifest.files[entry.path.name].crc32.get(entry.name))
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
        out |= {_join(names[0], part): place(_weight_of(module)) for part in own}
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
        new = BY_STORAGE[layer.storage](layer.in_features, layer.out_features, dtype=layer.torch_dtype, device="meta", large_m=layer.large_m)
        new.take(tuple(get(_join(names[0], part), old) for part in _parts(layer)))
        new.bias = get(_join(names[0], "bias"), old) if layer.bias else None
        new.input_scale = get(_join(names[0], "input_scale"), old) if layer.input_scale else None
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


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
