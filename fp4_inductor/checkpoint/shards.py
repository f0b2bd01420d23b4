"""A directory of safetensors shards as one set of tensors, proved consistent before a byte of data is used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SHOWN, CheckpointError
from .safetensors_file import Entry, Header, parse_json, read_header

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


def open_shards(directory: str | os.PathLike) -> Shards:
    """Prove the headers of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises:
        CheckpointError: no weights, a damaged or lying header, an index that disagrees with its shards or names a file
            elsewhere, one name in two shards.
    """
    path = Path(directory)
    if (path / INDEX).exists():
        weight_map = _weight_map(path)
        files = sorted(set(weight_map.values()))
    elif (path / SINGLE).exists():
        weight_map, files = None, [SINGLE]
    else:
        raise CheckpointError(
            "there are no safetensors weights here",
            value=str(path),
            limit=f"a directory with {SINGLE} or {INDEX}",
            remedy="Pickled weights (.bin, .pt) are never read: convert them to safetensors first.",
        )
    return collect({name: read_header(path / name) for name in files}, path, weight_map)


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
        raise CheckpointError(f"{what} misses tensors", value=", ".join(missing[:SHOWN]), limit="every stored tensor", remedy=remedy)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 256 MB, or CheckpointError."""
    try:
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


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map", value=repr(weight_map)[:80], limit="an object of names and files", remedy=_AGAIN)
    for file in weight_map.values():
        if not isinstance(file, str) or not _NAME.fullmatch(file):
            raise CheckpointError(
                f"{INDEX} names a file outside the checkpoint, or none",
                value=repr(file)[:200],
                limit="a plain file name that ends in .safetensors",
                remedy="No writer makes such an index: get the checkpoint from a source you trust.",
            )
    return weight_map
