"""``fp4_inductor.json``: what the tensors of a native checkpoint are.

::

    {"format": "fp4_inductor", "version": 1, "checksum": "<sha256 of the rest>",
     "layers":  {"model.layers.0.mlp.up_proj": {"in_features", "out_features", "dtype", "bias", "large_m", "format"}},
     "tensors": {"<parameter that is an NVFP4Tensor>": {"dtype", "transposed"}},
     "derived": ["<buffer that is not persistent: kept because a cast of the model rounded it, dropped if the model has it not>"],
     "aliases": {"lm_head.weight": "model.embed_tokens.weight"},
     "files":   {"fp4_inductor.safetensors": {"bytes", "header_sha256", "data_crc32"}},
     "report":  {"errors": {"<layer>": 0.083}, "kept": {"<parameter>": "<reason>"}}}
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..formats import nvfp4
from ..modules import FP4Linear, FP8Linear
from ..ops.linear import LARGE_M
from .safetensors_file import parse_json

FILE = "fp4_inductor.json"
FORMAT, VERSION = "fp4_inductor", 1
STEM = "fp4_inductor"
SINGLE = f"{STEM}.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
SHARD = re.compile(rf"{STEM}(-\d{{5}}-of-\d{{5}})?\.safetensors")
LAYERS: dict[str, type[FP4Linear] | type[FP8Linear]] = {"nvfp4": FP4Linear, "fp8": FP8Linear}
DTYPE_NAMES = {str(d).removeprefix("torch."): d for d in nvfp4.HIGH_PRECISION}
REWRITE = "Save the model again with fp4_inductor.save()."
MIXED = "Its files are of different saves, or were damaged on the way: copy the whole directory again."
_JSON_LIMIT = 256_000_000
_KEYS = {"format", "version", "checksum", "layers", "tensors", "derived", "aliases", "files", "report"}


@dataclass(frozen=True)
class LayerEntry:
    """An FP4Linear, or with ``format`` ``"fp8"`` an FP8Linear. A checkpoint without the field holds the former."""

    in_features: int
    out_features: int
    dtype: str
    bias: bool
    large_m: str
    format: str = "nvfp4"

    @property
    def module(self) -> type[FP4Linear] | type[FP8Linear]:
        return LAYERS[self.format]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """A Parameter that is an NVFP4Tensor."""

    dtype: str
    transposed: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    header_sha256: str
    data_crc32: int


@dataclass(frozen=True)
class Manifest:
    layers: dict[str, LayerEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def write(manifest: Manifest) -> bytes:
    """The file's bytes; the same manifest gives the same bytes."""
    body = asdict(manifest)
    body["report"] = {"errors": body.pop("errors"), "kept": body.pop("kept")}
    body |= {"format": FORMAT, "version": VERSION}
    body["checksum"] = checksum(body)
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def checksum(body: dict[str, Any]) -> str:
    """SHA-256 of everything but the checksum itself, in one canonical spelling."""
    rest = {k: v for k, v in body.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(directory: Path) -> Manifest:
    """Read and prove ``fp4_inductor.json``; every field is checked for type and range."""
    body = parse_json(read_small(directory / FILE), FILE)
    if body.get("format") != FORMAT:
        remedy = "Load it with the library that wrote it; fp4_inductor.load() reads what fp4_inductor.save() writes."
        raise CheckpointError(f"{FILE} is of another format", value=repr(body.get("format"))[:80], limit=repr(FORMAT), remedy=remedy)
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise CheckpointError(f"{FILE} has an unknown version", value=repr(body.get("version"))[:80], limit=VERSION, remedy="Update fp4_inductor.")
    if set(body) != _KEYS:
        raise CheckpointError(f"{FILE} has missing or unknown fields", value=sorted(set(body) ^ _KEYS)[:20], limit=sorted(_KEYS), remedy=REWRITE)
    try:
        right = body["checksum"] == checksum(body)
    except (ValueError, RecursionError) as error:  # lone surrogates cannot be encoded again
        raise CheckpointError(
            f"{FILE} cannot be checked", value=f"{type(error).__name__}: {error}", limit="JSON that can be written again", remedy=REWRITE
        ) from error
    if not right:
        raise CheckpointError(f"{FILE} was altered: its checksum does not match", value=repr(body["checksum"])[:80], limit=checksum(body), remedy=REWRITE)
    derived = body["derived"]
    _need(isinstance(derived, list) and all(isinstance(n, str) for n in derived), "derived", derived, "a list of names")
    report = body["report"]
    _need(isinstance(report, dict) and set(report) == {"errors", "kept"}, "report", report, "errors and kept")
    return Manifest(
        layers={k: _layer(k, v) for k, v in _mapping(body, "layers").items()},
        tensors={k: _tensor(k, v) for k, v in _mapping(body, "tensors").items()},
        derived=derived,
        aliases={k: _text(f"aliases[{k!r}]", v) for k, v in _mapping(body, "aliases").items()},
        files={check_file_name(k): _file(k, v) for k, v in _mapping(body, "files").items()},
        errors={k: _number(f"report.errors[{k!r}]", v) for k, v in _mapping(report, "errors").items()},
        kept={k: _text(f"report.kept[{k!r}]", v) for k, v in _mapping(report, "kept").items()},
    )


def read_small(path: Path) -> bytes:
    """The bytes of a JSON file, refused above 256 MB."""
    try:
        size = path.stat().st_size
        if size > _JSON_LIMIT:
            raise CheckpointError(f"{path.name} is too large", value=size, limit=f"<= {_JSON_LIMIT} bytes", remedy=REWRITE)
        return path.read_bytes()
    except OSError as error:
        remedy = "Name a directory that fp4_inductor.save() wrote."
        raise CheckpointError(f"{path.name} cannot be read", value=f"{error.strerror}: {path}", limit="a readable file", remedy=remedy) from error


def check_file_name(name: Any) -> str:
    """A shard's name, never a path: ``../x``, ``/x`` and ``a/b`` are refused."""
    if not isinstance(name, str) or not SHARD.fullmatch(name):
        raise CheckpointError(
            "a shard lies outside the checkpoint or has a foreign name",
            value=repr(name)[:200],
            limit=f"{STEM}-00001-of-00002.safetensors",
            remedy="fp4_inductor.save() never writes such a name: get the checkpoint from a source you trust.",
        )
    return name


def _need(condition: bool, what: str, value: Any, limit: object) -> None:
    if not condition:
        raise CheckpointError(f"{FILE}: {what} is not valid", value=repr(value)[:200], limit=limit, remedy=REWRITE)


def _mapping(body: dict, key: str) -> dict[str, Any]:
    _need(isinstance(body[key], dict), key, body[key], "an object")
    return body[key]


def _text(what: str, value: Any) -> str:
    _need(isinstance(value, str), what, value, "text")
    return value


def _number(what: str, value: Any) -> float:
    _need(type(value) in (int, float) and math.isfinite(value) and value >= 0, what, value, "a number >= 0")
    return float(value)


def _fields(what: str, value: Any, cls: type[LayerEntry] | type[TensorEntry] | type[FileEntry]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    _need(isinstance(value, dict) and set(value) == names, what, value, sorted(names))
    return value


def _layer(name: str, value: Any) -> LayerEntry:
    if isinstance(value, dict):
        value = {"format": "nvfp4"} | value
    v = _fields(f"layers[{name!r}]", value, LayerEntry)
    for key in ("in_features", "out_features"):
        _need(type(v[key]) is int and 0 < v[key] < 2**40, f"layers[{name!r}].{key}", v[key], "an integer > 0")
    _need(isinstance(v["dtype"], str) and v["dtype"] in DTYPE_NAMES, f"layers[{name!r}].dtype", v["dtype"], list(DTYPE_NAMES))
    _need(type(v["bias"]) is bool, f"layers[{name!r}].bias", v["bias"], "true or false")
    _need(isinstance(v["large_m"], str) and v["large_m"] in LARGE_M, f"layers[{name!r}].large_m", v["large_m"], list(LARGE_M))
    _need(isinstance(v["format"], str) and v["format"] in LAYERS, f"layers[{name!r}].format", v["format"], list(LAYERS))
    return LayerEntry(**v)


def _tensor(name: str, value: Any) -> TensorEntry:
    v = _fields(f"tensors[{name!r}]", value, TensorEntry)
    _need(isinstance(v["dtype"], str) and v["dtype"] in DTYPE_NAMES, f"tensors[{name!r}].dtype", v["dtype"], list(DTYPE_NAMES))
    _need(type(v["transposed"]) is bool, f"tensors[{name!r}].transposed", v["transposed"], "true or false")
    return TensorEntry(**v)


def _file(name: str, value: Any) -> FileEntry:
    v = _fields(f"files[{name!r}]", value, FileEntry)
    _need(type(v["bytes"]) is int and v["bytes"] >= 8, f"files[{name!r}].bytes", v["bytes"], "an integer >= 8")
    _need(isinstance(v["header_sha256"], str), f"files[{name!r}].header_sha256", v["header_sha256"], "text")
    _need(type(v["data_crc32"]) is int, f"files[{name!r}].data_crc32", v["data_crc32"], "an integer")
    return FileEntry(**v)
