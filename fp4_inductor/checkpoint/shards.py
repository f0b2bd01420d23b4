"""A directory of safetensors shards as one set of tensors, proved consistent before a byte of data is used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, list_names
from .safetensors_file import Entry, Header, parse_json, read_header, require_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_JSON_LIMIT = 256_000_000
_AGAIN = "Its files are of different versions, or were damaged on the way: download the whole directory again."


@dataclass(frozen=True)
class Shards:
    """Every tensor of a checkpoint by its name on disk. ``metadata``: the ``__metadata__`` of all shards together."""

    directory: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]


def variant_of(name: str, variant: str | None) -> str:
    """``model.safetensors`` -> ``model.fp16.safetensors``, as transformers calls the files of a variant."""
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def open_shards(directory: str | os.PathLike, variant: str | None = None) -> Shards:
    """Prove the headers of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Where both are, transformers reads the single file, and so does this: an index whose shards are gone is a leftover.

    Args:
        variant: the ``variant=`` of ``from_pretrained``, which is a part of the file names.

    Raises:
        CheckpointError: no weights, a damaged or lying header, an index that disagrees with its shards or names a file
            elsewhere, one name in two shards, a single file and a whole set of shards.
    """
    path = Path(directory)
    files, weight_map = files_of(path, variant)
    return collect({name: read_header(path / name) for name in files}, path, weight_map)


def files_of(path: Path, variant: str | None = None) -> tuple[list[str], dict[str, str] | None]:
    """``(names of the shards, tensor -> shard as the index says)`` of a folder; no index is read where one file holds everything.

    Raises:
        CheckpointError: no weights, a damaged index or one that names a file elsewhere, a single file and a whole set of shards.
    """
    single, index = variant_of(SINGLE, variant), variant_of(INDEX, variant)
    if (path / single).exists():
        shards = _shards_beside(path / index)
        if shards and shards != [single] and all((path / name).exists() for name in shards):
            raise CheckpointError(
                "the folder holds two checkpoints",
                value=f"{single}; {index} with {len(shards)} shards",
                limit="one of them",
                remedy="Remove the one that is not meant.",
            )
        return [single], None
    if not (path / index).exists():
        raise _no_weights(path, single, index)
    weight_map = weight_map_of(path / index)
    return sorted(set(weight_map.values())), weight_map


def _shards_beside(index: Path) -> list[str]:
    """The shards that an index beside a single file names; none if it is damaged, for nothing is read through it."""
    try:
        return sorted(set(weight_map_of(index).values())) if index.exists() else []
    except CheckpointError:
        return []


def _no_weights(path: Path, single: str, index: str) -> CheckpointError:
    if not path.is_dir():
        return CheckpointError("there is no such folder", value=str(path), limit="a folder with a checkpoint", remedy="Correct the path.")
    remedy = "Pickled weights (.bin, .pt) are never read: convert them to safetensors first."
    if (path / "fp4_inductor.json").exists():
        remedy = "fp4_inductor.save() wrote this folder: read it with fp4_inductor.load(lambda: Model(config), folder)."
    elif others := sorted(p.name for p in path.glob("model.*safetensors*") if p.name not in (SINGLE, INDEX))[:4]:
        remedy = f"There is {', '.join(others)}: pass variant=, or name the folder that holds the rest."
    return CheckpointError("there are no safetensors weights here", value=str(path), limit=f"a directory with {single} or {index}", remedy=remedy)


def shards_of(files: Iterable[str | os.PathLike], base: Path | None = None) -> Shards:
    """Prove the headers of exactly ``files``, and the index among their neighbours that names them, if there is one.

    Args:
        base: the folder that they have to lie in; None where nobody knows it.

    Raises:
        CheckpointError: as :func:`open_shards`; files of several folders, or outside ``base``.
    """
    paths = [Path(f) for f in files]
    names = {p.name: p for p in paths}
    directory = paths[0].parent
    inside = base is None or Path(os.path.abspath(directory)).is_relative_to(os.path.abspath(base))
    if len({p.parent for p in paths}) > 1 or not inside:
        raise CheckpointError(
            "weights outside of the checkpoint's folder",
            value=", ".join(str(p) for p in paths)[:200],
            limit=str(base or directory),
            remedy="No writer makes an index that names such files: get the checkpoint from a source you trust.",
        )
    headers = {name: read_header(p) for name, p in names.items()}
    for index in sorted(directory.glob("model.safetensors.index*.json")):
        if len(names) > 1 and set((weight_map := weight_map_of(index)).values()) == set(names):
            return collect(headers, directory, weight_map)
    return collect(headers, directory, None)


def collect(headers: Mapping[str, Header], directory: Path, weight_map: Mapping[str, str] | None) -> Shards:
    """The tensors of all shards together. ``weight_map``: the index; None where there is a single file without one."""
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file, header in headers.items():
        metadata |= header.metadata
        for name, entry in header.entries.items():
            if name in entries:
                raise CheckpointError(f"{name} is in two shards", value=f"{entries[name].path.name}, {file}", limit="one", remedy=_AGAIN)
            entries[name] = entry
    if weight_map is not None:
        check_index(INDEX, weight_map, entries, _AGAIN)
    return Shards(directory, entries, metadata)


def check_index(what: str, weight_map: Mapping[str, str], entries: Mapping[str, Entry], remedy: str) -> None:
    """Raise unless the index names exactly the stored tensors, each in its shard."""
    for name, file in weight_map.items():
        there = entries[name].path.name if name in entries else "in no shard"
        if there != file:
            raise CheckpointError(f"{what}: {name} is not in {file}", value=there, limit=file, remedy=remedy)
    missing = sorted(set(entries) - set(weight_map))
    if missing:
        raise CheckpointError(f"{what} misses tensors", value=list_names(missing), limit="every stored tensor", remedy=remedy)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 256 MB, or CheckpointError."""
    try:
        require_file(path)
        size = path.stat().st_size
        if size > _JSON_LIMIT:
            raise CheckpointError(f"{path.name} is too large", value=size, limit=f"<= {_JSON_LIMIT} bytes", remedy="No writer makes such a file: get it again.")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read",
            value=f"{error.strerror}: {path}",
            limit="a readable file",
            remedy="Name the directory that holds the whole checkpoint.",
        ) from error
    return parse_json(raw, path.name)


def weight_map_of(path: Path) -> dict[str, str]:
    """Tensor -> file, as the index ``path`` says."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map", value=repr(weight_map)[:80], limit="an object of names and files", remedy=_AGAIN)
    for file in weight_map.values():
        if not isinstance(file, str) or not _NAME.fullmatch(file):
            raise CheckpointError(
                f"{path.name} names a file outside the checkpoint, or none",
                value=repr(file)[:200],
                limit="a plain file name that ends in .safetensors",
                remedy="No writer makes such an index: get the checkpoint from a source you trust.",
            )
    return weight_map
