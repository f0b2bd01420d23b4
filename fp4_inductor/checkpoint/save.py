"""Write a model with FP4 layers as a native checkpoint: safetensors, an index above one shard, ``fp4_inductor.json``."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from ..models.coverage import recorded
from ..models.plan import tensor_key
from ..modules import FP4Experts, FP4Linear, SiblingWeight
from ..modules.marker import markers_of
from ..tensors.base import FP4Tensor
from . import manifest as mf
from .aside import as_path, publish, written_aside
from .safetensors_file import DTYPES, crc32, read_header
from .shards import INDEX, SINGLE

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save(model: nn.Module, dir: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Write ``model`` to ``dir``, bit for bit, to be read back by :func:`fp4_inductor.load`.

    Tensors keep their dtypes; a tensor that several names share is written once. A transformers model's configuration
    is written too, so that ``load`` can rebuild it. Files are written aside and renamed: a reader finds the old
    checkpoint, the new one, or (while a previous one is being replaced) none, never a mixture.

    The shards are called ``fp4_inductor*.safetensors`` so that a loader which knows nothing of FP4 finds no weights
    instead of half of them.

    Args:
        model: quantized or not; everything in its ``state_dict``, and the buffers that are not persistent (a rotary
            table that ``.to(bfloat16)`` rounded would otherwise come back unrounded).
        dir: created if needed.
        max_shard_size: bytes, or text like ``"5GB"``.

    Raises:
        CheckpointError: a tensor has no values (meta), a foreign subclass or dtype, a module keeps non-tensor state,
            or the files cannot be written.
        ConfigError: ``model`` is not a module, ``dir`` no path.
    """
    limit = _size(max_shard_size)
    directory = as_path(dir, "dir")
    if not isinstance(model, nn.Module):
        raise ConfigError("save() takes a module", value=type(model).__name__, limit="torch.nn.Module", remedy="Pass the model itself, not its state_dict.")
    model = getattr(model, "_orig_mod", model)
    if callable(getattr(getattr(model, "config", None), "save_pretrained", None)) and any((directory / name).exists() for name in (SINGLE, INDEX)):
        raise CheckpointError(
            "the folder holds a checkpoint of another format, whose config.json would be overwritten",
            value=str(directory),
            limit=f"a folder without {SINGLE} and {INDEX}",
            remedy="Choose another folder, or remove that checkpoint.",
        )
    stored, manifest = _collect(model)
    with written_aside(directory, sum(t.numel() * t.element_size() for t in stored.values())) as aside:
        _write(stored, manifest, aside, limit)
        write_config(model, aside, ("config", "generation_config"))
        publish(aside, directory, mf.FILE, lambda name: bool(mf.SHARD.fullmatch(name)) or name == mf.INDEX)


def _collect(model: nn.Module) -> tuple[dict[str, Tensor], mf.Manifest]:
    """Tensors to store by name, and the manifest without its files."""
    state: dict[str, Tensor] = {}
    tensors: dict[str, mf.TensorEntry] = {}
    derived = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, SiblingWeight)  # its layers write their rows
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None
    }
    markers = markers_of(model)  # for readers of other files than these
    for name, t in {**model.state_dict(keep_vars=True), **derived}.items():
        if name in markers:
            continue
        if not isinstance(t, Tensor):
            raise CheckpointError(
                f"{name} is not a tensor (a module's extra state)",
                value=type(t).__name__,
                limit="tensors: nothing is pickled",
                remedy="Keep it in a buffer, or remove the module's get_extra_state.",
            )
        if isinstance(t, FP4Tensor) and t.STORAGE.name in mf.STORAGES:
            tensors[name] = mf.TensorEntry(_dtype_name(t.logical_dtype), t.transposed, t.STORAGE.name)
            parts = {f"{name}.{part}": getattr(t, part) for part in t.PARTS}
        elif isinstance(t, FP4Tensor) or type(t) not in (Tensor, nn.Parameter, nn.Buffer):
            raise CheckpointError(
                f"{name} is of a tensor subclass that this format does not know",
                value=type(t).__name__,
                limit="torch.Tensor, NVFP4Tensor, Sparse24NVFP4Tensor",
                remedy="Make it a plain tensor first (dequantize, gather).",
            )
        else:
            parts = {name: t}
        for key, part in parts.items():
            if key in state:
                raise CheckpointError("two tensors of the model have one name on disk", value=key, limit="one", remedy="Rename one of them.")
            if part.device.type == "meta":
                raise CheckpointError(f"{key} is on the meta device", value=part.device, limit="tensors with values", remedy="Load the weights before saving.")
            if part.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{key} has a dtype that safetensors does not know",
                    value=part.dtype,
                    limit=[str(d) for d in DTYPES.values()],
                    remedy="Cast it to one of these.",
                )
            state[key] = part.detach()

    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, t in state.items():
        origin = first.setdefault(tensor_key(t), name)
        if origin == name:
            stored[name] = t
        else:
            aliases[name] = origin
    layers = {
        name: mf.LayerEntry(m.in_features, m.out_features, _dtype_name(m.dtype), m.bias is not None, m.prefill, m.input_scale is not None, m.storage().name)
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, FP4Linear)
    }
    experts = {
        name: mf.ExpertsEntry(
            m.first_name,
            m.first.shape,
            m.down_proj.shape,
            _dtype_name(m.first.dtype),
            m.first.bias is not None,
            asdict(m.activation),
            m.dense,
            m.prefill,
            tuple(part for part in (m.first_name, "down_proj") if getattr(m, part).input_scale is not None),
            (m.first.storage().name, m.down_proj.storage().name),
            m.identity,
        )
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, FP4Experts)
    }
    report = recorded(model)
    errors = {i.name: i.relative_error for i in report.layers if i.relative_error is not None} if report else {}
    kept = {s.name: s.reason for s in report.skipped} if report else {}
    return stored, mf.Manifest(layers=layers, experts=experts, tensors=tensors, derived=list(derived), aliases=aliases, errors=errors, kept=kept)


def _write(stored: dict[str, Tensor], manifest: mf.Manifest, aside: Path, limit: int) -> None:
    shards = _shards(stored, limit)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = mf.SINGLE if len(shards) == 1 else f"{mf.STEM}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        owned = {n: _owned(stored[n]) for n in names}
        save_file(owned, aside / file, metadata={"format": "pt"})
        header = read_header(aside / file)
        manifest.files[file] = mf.FileEntry(header.size, header.digest, {n: crc32(t) for n, t in owned.items()})
        del owned
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (aside / mf.INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    (aside / mf.FILE).write_bytes(mf.write(manifest))


def _shards(stored: dict[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, t in stored.items():
        size = t.numel() * t.element_size()
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _owned(t: Tensor) -> Tensor:
    """Contiguous on the CPU and alone in its storage (safetensors refuses views that share one)."""
    t = t.cpu().contiguous()
    return t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone()


def write_config(model: nn.Module, aside: Path, names: tuple[str, ...]) -> None:
    """Write those configs of a transformers model that it has."""
    for name in names:
        config = getattr(model, name, None)
        if name == "config" and config is not None and getattr(config, "architectures", ()) is None:  # of a model that was made from its config
            config = copy.copy(config)
            config.architectures = [type(model).__name__]
        write = getattr(config, "save_pretrained", None)
        if callable(write):
            try:
                write(aside)
            except OSError:
                raise
            except Exception as error:  # transformers refuses to write a generation_config whose options contradict each other
                raise CheckpointError(
                    f"the model's {name} cannot be written",
                    value=f"{type(error).__name__}: {error}",
                    limit=f"what model.{name}.save_pretrained() writes",
                    remedy=f"Correct the options of model.{name} that it names.",
                ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(value: int | str) -> int:
    size = value if type(value) is int else 0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", value, re.IGNORECASE)
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise CheckpointError(
            "max_shard_size is no size", value=repr(value), limit='bytes > 0, or text like "5GB" or "500MB"', remedy='Leave it out for "5GB".'
        )
    return size
