"""``inspect_checkpoint``: what is in a checkpoint, and is it damaged? No model is built.

Every file and every value is looked at once, and every problem is listed: loaders raise the first one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, list_names
from ..formats import mxfp4, nvfp4
from ..models.progress import bar
from . import manifest as mf
from .aside import as_path
from .contents import CheckpointContents, StoredTensor
from .directory import Checkpoint, check_data, check_values, checked_names, join, open_checkpoint
from .gguf_file import GGUFTensor, block_sizes, read_gguf
from .identify import GGUF, HF_QUANT_CONFIG, NATIVE, Identity, identify
from .readers import Found, StoredWeight, format_of, gguf
from .safetensors_file import Entry, Header, Reader, read_header
from .shards import CONFIG, INDEX, SINGLE, Shards, collect, files_of, read_json, weight_map_of

_CHUNK = 1 << 24  # values looked at at once
_AGAIN = "Download the checkpoint again, or quantize the model again."
_NAN = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e5m2: (0x7C, 0x7C)}  # (mask, least value that is no number)
_CODES = (torch.uint8, torch.int8, *_NAN)  # what quantized weights are stored in
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

Problems = list[CheckpointError]


def inspect_checkpoint(path: str | os.PathLike, *, read: bool = True, progress: bool = False) -> CheckpointContents:
    """Say which format a checkpoint is in, what is in it, and whether it is damaged. No model is built and no tensor is kept.

    Takes every format that :func:`fp4_inductor.load_pretrained` reads, and dense safetensors checkpoints. Headers and indexes are
    proved consistent first. Then every value is read once: checksums where the format has them, block scales that are NaN or negative,
    global scales that are not positive, illegal 2:4 metadata, NaN or Inf in tensors that are not quantized.

    Args:
        path: a folder, or a ``.gguf`` file. Needs the ``gguf`` package for the latter, and Transformers for none.
        read: False looks at names, shapes, sizes and indexes only.
        progress: show a progress bar.

    Returns:
        The contents. Damage does not raise, it is listed in ``damage``.

    Raises:
        CheckpointError: the path does not exist, holds no checkpoint, or is in a format without a reader.
    """
    where = as_path(path, "path")
    if damage := unreadable(where):
        sizes = _sizes(where, sorted(p.name for p in where.glob("*.safetensors")))
        return CheckpointContents(where, "unknown", files=sizes, damage=list(damage))
    what = identify(where)
    look = {GGUF: look_into_gguf, NATIVE: look_into_native}.get(what.format, look_into)
    return look(where, what, read, progress)


@contextmanager
def _listed(problems: Problems) -> Iterator[None]:
    """A CheckpointError of the block becomes one more problem."""
    try:
        yield
    except CheckpointError as error:
        problems.append(error)


def unreadable(path: Path) -> Problems:
    """The JSON files of a folder with weights that are not what a writer makes."""
    problems: Problems = []
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return problems
    for name in (CONFIG, HF_QUANT_CONFIG):
        if (path / name).exists():
            with _listed(problems):
                read_json(path / name)
    if (path / INDEX).exists() and not (path / SINGLE).exists():
        with _listed(problems):
            weight_map_of(path / INDEX)
    return problems


# --- safetensors: what other libraries write, what save_pretrained writes, dense models ---------------------------


def look_into(path: Path, what: Identity, read: bool, progress: bool) -> CheckpointContents:
    """The contents of a folder of safetensors files that ``what`` was found to be."""
    problems: Problems = []
    files, weight_map = files_of(path)
    headers = _headers(path, files, problems)
    shards = Shards(path, {n: e for h in headers.values() for n, e in h.entries.items()}, {n: v for h in headers.values() for n, v in h.metadata.items()})
    found = Found()
    if not problems:
        with _listed(problems):
            shards = collect(headers, path, weight_map)
    if what.quantized and not problems:
        with _listed(problems):
            found = format_of(what.source).find(shards, what.source)
            if not any(weight.packed for weight in found.weights.values()):
                raise CheckpointError(
                    "no quantized weight was found",
                    value=f"{len(shards.entries)} tensors",
                    limit=f"{what.format} weights, as config.json says",
                    remedy="config.json and the weights are of different models: download the checkpoint again.",
                )
    rest = {name: e for name, e in shards.entries.items() if name not in found.used and name not in found.ignored}
    tensors = [StoredTensor(w.name, w.format, _rows_first(w), w.bytes, True, w.input_scale is not None) for w in found.weights.values()]
    tensors += [_plain(e) for e in rest.values()]
    sizes = _sizes(path, files)
    notes = list(found.notes) + [f"{reason}: {sum(r == reason for r in found.ignored.values())} tensors" for reason in sorted(set(found.ignored.values()))]
    if not what.quantized and (odd := [e.name for e in rest.values() if e.dtype in _CODES]):
        notes.append(f"{len(odd)} tensors hold bytes or 8-bit floats ({list_names(odd)}), and config.json does not say what they are")
    if read:
        with Reader() as reader:
            for item in bar([*found.weights.values(), *rest.values()], "read", "tensor", progress):
                with _listed(problems):
                    if isinstance(item, Entry):
                        check_finite(item.name, reader.read(item))
                    else:
                        notes += _look_at(item, reader)
    return CheckpointContents(path, what.format, what.detail, what.architecture, tensors, sizes, list(problems), read, notes)


def _headers(path: Path, files: Iterable[str], problems: Problems) -> dict[str, Header]:
    headers = {}
    for name in files:
        with _listed(problems):
            headers[name] = read_header(path / name)
    return headers


def _sizes(path: Path, files: Iterable[str]) -> dict[str, int]:
    return {name: (path / name).stat().st_size for name in files if (path / name).is_file()}


def _plain(entry: Entry) -> StoredTensor:
    return StoredTensor(entry.name, str(entry.dtype).removeprefix("torch."), entry.shape, entry.end - entry.start)


def _rows_first(weight: StoredWeight) -> tuple[int, ...]:
    """``[..., N, K]``, however the model keeps it."""
    *lead, a, b = weight.shape
    return (*lead, b, a) if weight.transposed else (*lead, a, b)


def _look_at(weight: StoredWeight, reader: Reader) -> list[str]:
    """Read one weight as a loader does; returns what a reader of the report should know."""
    t = weight.read(reader, torch.float32)
    weight.read_input_scale(reader)
    if weight.format == mxfp4.NAME and type(t) is Tensor:
        return [f"{weight.name}: its exponents span more than one NVFP4 global scale holds; strict=False keeps it in high precision"]
    return []


# --- the native format --------------------------------------------------------------------------------------------


def look_into_native(path: Path, what: Identity, read: bool, progress: bool) -> CheckpointContents:
    """The contents of a folder that :func:`fp4_inductor.save` wrote."""
    problems: Problems = []
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    checkpoint = None
    with _listed(problems):
        files = mf.read(path).files
        sizes = _sizes(path, files)
        headers = _headers(path, files, problems)
    if not problems:
        with _listed(problems):
            checkpoint = open_checkpoint(path)
    if checkpoint is None:
        tensors = [_plain(e) for header in headers.values() for e in header.entries.values()]
        return CheckpointContents(path, what.format, what.detail, what.architecture, tensors, sizes, list(problems), False)
    manifest = checkpoint.manifest
    tensors, used = _packed(checkpoint)
    stored = {e.name: e for e in checkpoint.entries.values()}
    tensors += [_plain(e) for name, e in stored.items() if name not in used]
    notes = [f"{alias} is {name}" for alias, name in manifest.aliases.items()]
    if read:
        checked = checked_names(checkpoint)
        with _listed(problems):
            check_data(checkpoint, path)
        with Reader() as reader:
            for entry in bar(sorted(stored.values(), key=lambda e: (e.path, e.start)), "read", "tensor", progress):
                with _listed(problems):
                    t = reader.read(entry, manifest.files[entry.path.name].crc32.get(entry.name))
                    if entry.name in checked:
                        check_values(entry.name, t)
                    else:
                        check_finite(entry.name, t)
    return CheckpointContents(path, what.format, what.detail, what.architecture, tensors, sizes, list(problems), read, notes)


def _packed(checkpoint: Checkpoint) -> tuple[list[StoredTensor], set[str]]:
    """(the quantized weights, names of the stored tensors that they are made of)."""
    manifest, entries = checkpoint.manifest, checkpoint.entries
    tensors: list[StoredTensor] = []
    used: set[str] = set()

    def add(base: str, name: str, storage: str, shape: tuple[int, ...], input_scale: bool) -> None:
        names = [join(base, part) for part in (*mf.STORAGES[storage].names, *(("input_scale",) if input_scale else ()))]
        parts = {entries[n].name: entries[n] for n in names}
        size = sum(e.end - e.start for n, e in parts.items() if n not in used)  # layers that share a weight count it once
        used.update(parts)
        tensors.append(StoredTensor(name, storage, shape, size, True, input_scale))

    for name, layer in manifest.layers.items():
        add(name, join(name, "weight"), layer.storage, (layer.out_features, layer.in_features), layer.input_scale)
    for name, e in manifest.experts.items():
        for part, shape, storage in zip((e.first, "down_proj"), (e.gate_up, e.down), e.storages, strict=True):
            add(join(name, part), join(name, part), storage, shape, part in e.input_scales)
    for name, kept in manifest.tensors.items():
        layout = mf.STORAGES[kept.storage]
        add(name, name, kept.storage, layout.logical(entries[join(name, layout.names[0])].shape), False)
    return tensors, used


# --- GGUF ---------------------------------------------------------------------------------------------------------


def look_into_gguf(path: Path, what: Identity, read: bool, progress: bool) -> CheckpointContents:
    """The contents of a ``.gguf`` file."""
    problems: Problems = []
    size = {path.name: path.stat().st_size}
    file, known = None, block_sizes()  # a package that is missing is no damage
    with _listed(problems):
        file = read_gguf(path, known)
    if file is None:
        return CheckpointContents(path, what.format, files=size, damage=list(problems))
    from gguf import GGMLQuantizationType

    kinds = {t.name: GGMLQuantizationType(t.kind).name for t in file.tensors.values()}
    tensors = [StoredTensor(t.name, kinds[t.name].lower(), t.shape, t.end - t.start, kinds[t.name] in gguf.TYPES) for t in file.tensors.values()]
    unread = sorted({kind for kind in kinds.values() if kind not in gguf.TYPES and kind not in _PLAIN})
    notes = [f"values of the types {', '.join(unread)} are not looked into; they load in high precision"] if unread else []
    if read:
        with Reader() as reader:
            for t in bar(file.tensors.values(), "read", "tensor", progress, total=len(file.tensors)):
                with _listed(problems):
                    _look_at_gguf(path, t, kinds[t.name], reader)
    tensors.sort(key=lambda t: not t.quantized)
    return CheckpointContents(path, what.format, "", file.architecture, tensors, size, list(problems), read, notes)


def _look_at_gguf(path: Path, t: GGUFTensor, kind: str, reader: Reader) -> None:
    if kind in _PLAIN:
        check_finite(t.name, reader.read(Entry(t.name, _PLAIN[kind], t.shape, path, t.start, t.end)))
    elif kind in gguf.TYPES:
        _, block, front = gguf.TYPES[kind]
        raw = reader.read(Entry(t.name, torch.uint8, (t.end - t.start,), path, t.start, t.end))
        largest = int(raw.view(-1, block)[:, :front].max()) if raw.numel() else 0
        limit = nvfp4.SCALE_MAX_BYTE if kind == "NVFP4" else mxfp4.SCALE_NAN - 1
        if largest > limit:
            raise CheckpointError(f"{t.name} holds a block scale that is no number", value=hex(largest), limit=f"0x00 .. {hex(limit)}", remedy=_AGAIN)


# --- values -------------------------------------------------------------------------------------------------------


def check_finite(name: str, t: Tensor) -> None:
    """Raise CheckpointError if ``t`` holds NaN, or Inf that is no mask (zeros and minus infinity only)."""
    bad = sum(_not_finite(part) for part in t.reshape(-1).split(_CHUNK))
    if bad and not _is_mask(t):
        raise CheckpointError(f"{name} holds NaN or Inf", value=f"{bad} of {t.numel()} values", limit="finite values", remedy=_AGAIN)


def _not_finite(t: Tensor) -> int:
    if t.dtype in _NAN:
        mask, least = _NAN[t.dtype]
        return int(((t.view(torch.uint8) & mask) >= least).sum())
    return int((~torch.isfinite(t)).sum()) if t.is_floating_point() or t.is_complex() else 0


def _is_mask(t: Tensor) -> bool:
    return t.dtype not in _NAN and not t.is_complex() and bool(((t == 0) | (t == -torch.inf)).all())
