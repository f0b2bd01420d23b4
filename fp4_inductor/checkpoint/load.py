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

from ..errors import CheckpointError
from ..formats import nvfp4
from ..models import siblings
from ..models.convert import carry_over, replace_module, untie
from ..models.coverage import record
from ..models.plan import inspect, linear_kind
from ..models.preflight import check_device
from ..modules import FP4Linear, FP8Linear
from ..tensors import NVFP4Tensor
from . import manifest as mf
from .build import build_empty, values_lost
from .safetensors_file import Entry, Header, Reader, data_crc32, parse_json, read_header

_SHOWN = 20
_PARTS = NVFP4Tensor.PARTS
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
    check_scales(checkpoint)
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
    slots = _match(model, checkpoint, strict)
    tensors = _read(model, checkpoint, slots, where)
    model = _install(model, checkpoint, slots, tensors)
    if where is not None:
        model.to(where)
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
    entries: dict[str, Entry] = {}
    for file, header in headers.items():
        for name, entry in header.entries.items():
            if name in entries:
                raise CheckpointError(f"{name} is in two shards", value=f"{entries[name].path.name}, {file}", limit="one", remedy=mf.REWRITE)
            entries[name] = entry
    _check_index(directory, headers)
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


def _check_index(directory: Path, headers: dict[str, Header]) -> None:
    if len(headers) == 1 and not (directory / mf.INDEX).exists():
        return
    index = parse_json(mf.read_small(directory / mf.INDEX), mf.INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{mf.INDEX} has no weight_map", value=type(weight_map).__name__, limit="an object", remedy=mf.MIXED)
    real = {name: file for file, header in headers.items() for name in header.entries}
    for name, file in weight_map.items():
        mf.check_file_name(file)
        if real.get(name) != file:
            raise CheckpointError(f"{mf.INDEX}: {name} is not in {file}", value=real.get(name, "in no shard"), limit=file, remedy=mf.MIXED)
    missing = sorted(set(real) - set(weight_map))
    if missing:
        raise CheckpointError(f"{mf.INDEX} misses tensors", value=", ".join(missing[:_SHOWN]), limit="every stored tensor", remedy=mf.MIXED)


def _check_parts(manifest: mf.Manifest, entries: dict[str, Entry]) -> None:
    for name, layer in manifest.layers.items():
        if layer.format == "fp8":
            n, k = layer.out_features, layer.in_features
            _check_tensors(name, entries, {"weight": ((n, k), torch.float8_e4m3fn), "weight_scale": ((n,), torch.float32)})
        else:
            _check_matrix(name, entries, (layer.out_features, layer.in_features + -layer.in_features % nvfp4.GROUP))
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
    for name in manifest.tensors:
        qdata = entries.get(f"{name}.qdata")
        shape = None if qdata is None or len(qdata.shape) < 2 else (*qdata.shape[:-1], qdata.shape[-1] * 2)
        _check_matrix(name, entries, shape)


def _check_matrix(name: str, entries: dict[str, Entry], shape: tuple[int, ...] | None) -> None:
    """qdata, scale and global_scale of one weight ``[..., N, K]`` exist with the right shapes and dtypes."""
    if shape is None or shape[-1] % nvfp4.GROUP:
        raise CheckpointError(
            f"{name}.qdata is missing or no matrix of whole blocks",
            value="no matrix" if shape is None else f"K = {shape[-1]}",
            limit="[..., N, K/2] with K % 16 == 0",
            remedy=mf.REWRITE,
        )
    want = {
        "qdata": ((*shape[:-1], shape[-1] // 2), torch.uint8),
        "scale": ((*shape[:-1], shape[-1] // nvfp4.GROUP), nvfp4.SCALE_DTYPE),
        "global_scale": (tuple(shape[:-2]), torch.float32),
    }
    _check_tensors(name, entries, want)


def _check_tensors(name: str, entries: dict[str, Entry], want: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """The parts of one layer exist with these shapes and dtypes."""
    for part, (part_shape, dtype) in want.items():
        entry = entries.get(_join(name, part))
        if entry is None:
            raise CheckpointError(f"{_join(name, part)} is missing", value="no such tensor", limit=f"{dtype} {part_shape}", remedy=mf.REWRITE)
        if entry.shape != part_shape or entry.dtype != dtype:
            raise CheckpointError(
                f"{_join(name, part)} has the wrong shape or dtype",
                value=f"{entry.dtype} {entry.shape}",
                limit=f"{dtype} {part_shape}",
                remedy=mf.REWRITE,
            )


def check_data(checkpoint: Checkpoint, directory: Path) -> None:
    """Every byte of every tensor is the one that was saved: a flipped bit in a code is a legal code, and only this sees it."""
    for name, entry in checkpoint.manifest.files.items():
        crc = data_crc32(directory / name)
        if crc != entry.data_crc32:
            raise CheckpointError(
                f"{name}: the tensors were altered since they were saved", value=f"CRC-32 {crc:08x}", limit=f"{entry.data_crc32:08x}", remedy=_DAMAGED
            )


def check_scales(checkpoint: Checkpoint) -> None:
    """No scale byte is NaN or negative, every global scale is finite and positive. Reads a ninth of the weights."""
    with Reader() as reader:
        for name in (*(n for n, layer in checkpoint.manifest.layers.items() if layer.format == "nvfp4"), *checkpoint.manifest.tensors):
            scale = reader.read(checkpoint.entries[_join(name, "scale")]).view(torch.uint8)
            if scale.numel() and int(scale.max()) > _E4M3_MAX_BYTE:
                raise CheckpointError(
                    f"{_join(name, 'scale')} holds a NaN or negative scale", value=hex(int(scale.max())), limit="0x00 .. 0x7e", remedy=_DAMAGED
                )
            g = reader.read(checkpoint.entries[_join(name, "global_scale")])
            bad = g[~(torch.isfinite(g) & (g > 0))]
            if bad.numel():
                raise CheckpointError(
                    f"{_join(name, 'global_scale')} must be finite and positive", value=bad[:4].tolist(), limit="finite and > 0", remedy=_DAMAGED
                )


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
        taken |= {_join(name, part) for part in (*layer.module.parts, "bias", "weight")}
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
                used |= {f"{name}.{part}" for part in _PARTS}
                fp4[name] = (module, attribute)
                shape = _logical_shape(manifest.tensors[name], entries[f"{name}.qdata"])
                if tuple(t.shape) != shape:
                    wrong.append(f"{name}: shape {shape} in the checkpoint, {tuple(t.shape)} in the model")
            elif name in entries:
                used.add(name)
                plain[name] = (module, attribute)
                if isinstance(t, NVFP4Tensor):
                    wrong.append(f"{name}: dense in the checkpoint, an NVFP4Tensor in the model")
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
    if isinstance(module, (FP4Linear, FP8Linear)):
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
    """Every tensor on its device; a stored tensor that several names share is read once."""
    default = next((t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"), torch.device("cpu"))
    tensors: dict[tuple[Entry, torch.device], Tensor] = {}
    with Reader() as reader:
        places = _places(slots, device, default, checkpoint)
        # In the order of the files: sequential reads.
        for name, place in sorted(places.items(), key=lambda item: (checkpoint.entries[item[0]].path, checkpoint.entries[item[0]].start)):
            key = (checkpoint.entries[name], place)
            if key not in tensors:
                tensors[key] = reader.read(key[0]).to(place)
    return tensors


def _places(slots: _Slots, device: torch.device | None, default: torch.device, checkpoint: Checkpoint) -> dict[str, torch.device]:
    def place(t: Tensor | None) -> torch.device:
        return device if device is not None else default if t is None or t.device.type == "meta" else t.device

    out = {name: place(getattr(module, attribute)) for name, (module, attribute) in slots.plain.items()}
    for name, (module, attribute) in slots.fp4.items():
        out |= {f"{name}.{part}": place(getattr(module, attribute)) for part in _PARTS}
    for names, module in slots.layers:
        layer = checkpoint.manifest.layers[names[0]]
        old = _weight_of(module)
        parts = (*layer.module.parts, "bias") if layer.bias else layer.module.parts
        out |= {_join(names[0], part): place(old) for part in parts}
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
        qdata, scale, global_scale = (get(f"{name}.{part}", old) for part in _PARTS)
        weight = NVFP4Tensor(qdata, scale, global_scale, kind.torch_dtype, kind.transposed)
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False) if attribute in module._parameters else weight)
    for names, module in slots.layers:
        layer = checkpoint.manifest.layers[names[0]]
        old = _weight_of(module)
        if owners[id(module._parameters.get("weight"))] > len(names):
            untie(model, names[0])
        new = layer.module(layer.in_features, layer.out_features, dtype=layer.torch_dtype, device="meta", large_m=layer.large_m)
        for part in layer.module.parts:
            setattr(new, part, get(_join(names[0], part), old))
        new.bias = get(_join(names[0], "bias"), old) if layer.bias else None
        carry_over(module, new)
        model = replace_module(model, names, new)
    return model


def _weight_of(module: nn.Module) -> Tensor:
    """A tensor that lies where the weight of ``module`` lies."""
    if isinstance(module, FP4Linear):
        return module.qdata
    return module.weight if isinstance(module, FP8Linear) else module._parameters["weight"]  # type: ignore[return-value]


def _logical_shape(entry: mf.TensorEntry, qdata: Entry) -> tuple[int, ...]:
    shape = (*qdata.shape[:-1], qdata.shape[-1] * 2)
    return (*shape[:-2], shape[-1], shape[-2]) if entry.transposed else shape


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
