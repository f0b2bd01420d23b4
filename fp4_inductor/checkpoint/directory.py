"""A native checkpoint's directory, proved: files, headers, index, shapes and dtypes, before a weight is read; values as they are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, SparsityError, list_names
from ..formats import nvfp4, sparse24
from ..formats.storage import Storage
from . import manifest as mf
from .aside import as_path
from .safetensors_file import Entry, Header, data_crc32, parse_json, read_header
from .shards import CONFIG, check_index

_DAMAGED = "The weights are damaged: copy the checkpoint again, or quantize the model again."


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose structure is proved: ``entries`` has every tensor, aliases included."""

    manifest: mf.Manifest
    entries: dict[str, Entry]


def open_checkpoint(dir: str | os.PathLike) -> Checkpoint:
    """Prove the structure of a checkpoint directory without reading a weight."""
    directory = as_path(dir, "dir")
    if not directory.is_dir():
        raise CheckpointError("there is no such folder", value=str(directory), limit="a folder that fp4_inductor.save() wrote", remedy="Correct the path.")
    if not (directory / mf.FILE).exists() and (directory / CONFIG).exists():
        remedy = "fp4_inductor.load_pretrained(folder) reads a quantized one; load a dense one with its own library and call quantize_model."
        raise CheckpointError("fp4_inductor.save() did not write this folder", value=str(directory), limit=f"a folder with {mf.FILE}", remedy=remedy)
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
            raise CheckpointError(f"{mf.FILE}: crc32 does not list the tensors of {name}", value=list_names(odd), limit="each of them", remedy=mf.REWRITE)
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
        raise CheckpointError(f"{mf.FILE} lists buffers that are not stored", value=list_names(absent), limit="names of stored tensors", remedy=mf.REWRITE)
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
        bias = entries.get(join(name, "bias"))
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
        of_input = entries.get(join(name, "input_scale"))
        if (of_input is not None) != layer.input_scale or (of_input is not None and (of_input.shape != () or of_input.dtype != torch.float32)):
            there = "absent" if of_input is None else f"{of_input.dtype} {of_input.shape}"
            limit = "float32 ()" if layer.input_scale else "absent"
            raise CheckpointError(f"{name}.input_scale is not as {mf.FILE} says", value=there, limit=limit, remedy=mf.REWRITE)
    for name, experts in manifest.experts.items():
        blank = experts.module()
        for part, weight in ((experts.first, blank.first), ("down_proj", blank.down_proj)):
            _check_matrix(join(name, part), entries, weight.storage(), weight.stored)
            of_input = entries.get(join(name, f"{part}.input_scale"))
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
        entry = entries.get(join(name, part.name))
        if entry is None:
            raise CheckpointError(f"{join(name, part.name)} is missing", value="no such tensor", limit=f"{part.dtype} {part_shape}", remedy=mf.REWRITE)
        if entry.shape != part_shape or entry.dtype != part.dtype:
            raise CheckpointError(
                f"{join(name, part.name)} has the wrong shape or dtype",
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


def checked_names(checkpoint: Checkpoint) -> set[str]:
    """Names on disk of the tensors that :func:`check_values` is for: scales of every kind, and 2:4 metadata."""
    manifest, entries = checkpoint.manifest, checkpoint.entries
    experts = {join(name, part): s for name, e in manifest.experts.items() for part, s in zip((e.first, "down_proj"), e.storages, strict=True)}
    storages = {name: e.storage for weights in (manifest.layers, manifest.tensors) for name, e in weights.items()} | experts
    checked = {join(name, part) for name in storages for part in ("scale", "global_scale", "input_scale")}
    checked |= {join(name, "meta") for name, storage in storages.items() if storage == sparse24.NAME}
    return {entries[name].name for name in checked if name in entries}  # an alias is checked under its own name


def check_values(name: str, t: Tensor) -> None:
    """A block scale is not NaN or negative, a global scale is finite and positive, 2:4 metadata is legal. ``name``: of the tensor."""
    if t.dtype == nvfp4.SCALE_DTYPE:
        largest = int(t.view(torch.uint8).max()) if t.numel() else 0
        if largest > nvfp4.SCALE_MAX_BYTE:
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


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
