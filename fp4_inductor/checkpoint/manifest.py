"""``fp4_inductor.json``: what the tensors of a native checkpoint are.

::

    {"format": "fp4_inductor", "version": 3, "checksum": "<sha256 of the rest>",
     "layers":  {"model.layers.0.mlp.up_proj": {"in_features", "out_features", "dtype", "bias", "prefill", "input_scale", "storage"}},
     "experts": {"model.layers.0.mlp.experts": {"first", "gate_up", "down", "dtype", "bias", "activation", "dense", "prefill", "input_scales",
                 "storages"}},
     "tensors": {"<parameter that is an FP4Tensor>": {"dtype", "transposed", "storage"}},
     "derived": ["<buffer that is not persistent: kept because a cast of the model rounded it, dropped if the model has it not>"],
     "aliases": {"lm_head.weight": "model.embed_tokens.weight"},
     "files":   {"fp4_inductor.safetensors": {"bytes", "header_sha256", "crc32": {"<tensor>": 1234567890}}},
     "report":  {"errors": {"<layer>": 0.083}, "kept": {"<parameter>": "<reason>"}}}

``storage`` names the format (:data:`STORAGES`) and so the tensors of a weight, ``storages`` those of the two weights of experts;
without it they are dense NVFP4.
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

from .._renamed import current
from ..errors import CheckpointError, ConfigError
from ..formats import fp8, nvfp4, sparse24
from ..modules import EXPERTS_BY_STORAGE, FP4Experts
from ..ops.activation import Activation
from ..ops.linear import PREFILL, WEIGHT_ONLY
from .safetensors_file import parse_json, require_file

FILE = "fp4_inductor.json"
FORMAT, VERSION = "fp4_inductor", 3
_FIRST = 1  # as 2, with one CRC over the data of a file, "data_crc32", and no input scales. 2: "prefill" has its old name. Both are still read
STEM = "fp4_inductor"
SINGLE = f"{STEM}.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
SHARD = re.compile(rf"{STEM}(-\d{{5}}-of-\d{{5}})?\.safetensors")
DTYPE_NAMES = {str(d).removeprefix("torch."): d for d in nvfp4.HIGH_PRECISION}
REWRITE = "Save the model again with fp4_inductor.save()."
MIXED = "Its files are of different saves, or were damaged on the way: copy the whole directory again."
_JSON_LIMIT = 256_000_000
_KEYS = {"format", "version", "checksum", "layers", "tensors", "derived", "aliases", "files", "report"}
_OPTIONAL = {"storage", "storages", "identity"}
_DENSE_EXPERTS = (nvfp4.NAME, nvfp4.NAME)
_LATER = {"experts"}  # absent in checkpoints written before there were any


STORAGES = {storage.name: storage for storage in (nvfp4.STORAGE, sparse24.STORAGE, fp8.STORAGE)}


@dataclass(frozen=True)
class LayerEntry:
    """An FP4Linear."""

    in_features: int
    out_features: int
    dtype: str
    bias: bool
    prefill: str
    input_scale: bool = False
    storage: str = nvfp4.NAME

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class ExpertsEntry:
    """FP4Experts.

    ``first``: attribute of the first weight; ``gate_up`` and ``down``: ``[E, N, K]`` without padding, in the formats ``storages``;
    ``input_scales``: the weights that have one; ``identity``: how many ids behind the last expert return their input.
    """

    first: str
    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]
    dtype: str
    bias: bool
    activation: dict[str, Any]
    dense: bool
    prefill: str
    input_scales: tuple[str, ...] = ()
    storages: tuple[str, str] = _DENSE_EXPERTS
    identity: int = 0

    def module(self) -> FP4Experts:
        """The module, on the meta device."""
        (experts, rows, columns), (_, width, inner) = self.gate_up, self.down
        options: dict[str, Any] = {"bias": self.bias, "dtype": DTYPE_NAMES[self.dtype], "device": "meta"}
        kinds = [EXPERTS_BY_STORAGE[name] for name in self.storages]
        padding, extra = (-k % kind.storage().k_multiple for k, kind in zip((columns, inner), kinds, strict=True))
        first = kinds[0](experts, rows + rows // inner * extra, columns + padding, rows=rows, columns=columns, **options)
        down = kinds[1](experts, width, inner + extra, rows=width, columns=inner, **options)
        for name, weight in ((self.first, first), ("down_proj", down)):
            if name in self.input_scales:
                weight.input_scale = torch.ones(experts, dtype=torch.float32, device="meta")
        return FP4Experts(first, down, Activation(**self.activation), first_name=self.first, dense=self.dense, identity=self.identity, prefill=self.prefill)


@dataclass(frozen=True)
class TensorEntry:
    """A Parameter that is an FP4Tensor."""

    dtype: str
    transposed: bool
    storage: str = nvfp4.NAME

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """``crc32``: of each tensor's bytes, by name. ``data_crc32``: of all of them together, in files of version 1 only."""

    bytes: int
    header_sha256: str
    crc32: dict[str, int] = field(default_factory=dict)
    data_crc32: int | None = None


@dataclass(frozen=True)
class Manifest:
    layers: dict[str, LayerEntry] = field(default_factory=dict)
    experts: dict[str, ExpertsEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def write(manifest: Manifest) -> bytes:
    """The file's bytes; the same manifest gives the same bytes."""
    body = asdict(manifest)
    if not manifest.experts:
        del body["experts"]
    for entry in (*body["layers"].values(), *body["tensors"].values()):
        if entry["storage"] == nvfp4.NAME:
            del entry["storage"]
    for entry in body.get("experts", {}).values():
        if entry["storages"] == _DENSE_EXPERTS:
            del entry["storages"]
        if not entry["identity"]:
            del entry["identity"]
    body["report"] = {"errors": body.pop("errors"), "kept": body.pop("kept")}
    for entry in body["files"].values():
        del entry["data_crc32"]
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
    version = body.get("version")
    if type(version) is not int or not _FIRST <= version <= VERSION:
        raise CheckpointError(f"{FILE} has an unknown version", value=repr(version)[:80], limit=f"{_FIRST} to {VERSION}", remedy="Update fp4_inductor.")
    if set(body) - _LATER != _KEYS:
        raise CheckpointError(f"{FILE} has missing or unknown fields", value=sorted((set(body) - _LATER) ^ _KEYS)[:20], limit=sorted(_KEYS), remedy=REWRITE)
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
        layers={k: _layer(k, v, version) for k, v in _mapping(body, "layers").items()},
        experts={k: _experts(k, v, version) for k, v in _mapping({"experts": {}} | body, "experts").items()},
        tensors={k: _tensor(k, v) for k, v in _mapping(body, "tensors").items()},
        derived=derived,
        aliases={k: _text(f"aliases[{k!r}]", v) for k, v in _mapping(body, "aliases").items()},
        files={check_file_name(k): _file(k, v, version) for k, v in _mapping(body, "files").items()},
        errors={k: _number(f"report.errors[{k!r}]", v) for k, v in _mapping(report, "errors").items()},
        kept={k: _text(f"report.kept[{k!r}]", v) for k, v in _mapping(report, "kept").items()},
    )


def read_small(path: Path) -> bytes:
    """The bytes of a JSON file, refused above 256 MB."""
    try:
        require_file(path)
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


def _fields(what: str, value: Any, cls: type[LayerEntry] | type[ExpertsEntry] | type[TensorEntry] | type[FileEntry], without: str = "") -> dict[str, Any]:
    names = {f.name for f in fields(cls)} - {without}
    value = current(value) if isinstance(value, dict) else value
    _need(isinstance(value, dict) and names - _OPTIONAL <= set(value) <= names, what, value, sorted(names))
    return value


def _layer(name: str, value: Any, version: int) -> LayerEntry:
    v = _fields(f"layers[{name!r}]", value, LayerEntry, "input_scale" if version == _FIRST else "")
    for key in ("in_features", "out_features"):
        _need(type(v[key]) is int and 0 < v[key] < 2**40, f"layers[{name!r}].{key}", v[key], "an integer > 0")
    _need(isinstance(v["dtype"], str) and v["dtype"] in DTYPE_NAMES, f"layers[{name!r}].dtype", v["dtype"], list(DTYPE_NAMES))
    for key in ("bias", "input_scale"):
        _need(type(v.get(key, False)) is bool, f"layers[{name!r}].{key}", v.get(key), "true or false")
    accepted = PREFILL if v.get("storage", nvfp4.NAME) == nvfp4.NAME else WEIGHT_ONLY
    _need(isinstance(v["prefill"], str) and v["prefill"] in accepted, f"layers[{name!r}].prefill", v["prefill"], list(accepted))
    _storage(f"layers[{name!r}]", v)
    return LayerEntry(**v)


def _experts(name: str, value: Any, version: int) -> ExpertsEntry:
    what = f"experts[{name!r}]"
    v = _fields(what, value, ExpertsEntry, "input_scales" if version == _FIRST else "")
    scales = v.setdefault("input_scales", [])
    _need(isinstance(scales, list) and all(s in (v["first"], "down_proj") for s in scales), f"{what}.input_scales", scales, "names of its weights")
    storages = v.get("storages", list(_DENSE_EXPERTS))
    right = isinstance(storages, list) and len(storages) == 2 and all(isinstance(s, str) and s in EXPERTS_BY_STORAGE for s in storages)
    _need(right, f"{what}.storages", storages, f"two of {list(EXPERTS_BY_STORAGE)}")
    identity = v.get("identity", 0)
    _need(type(identity) is int and 0 <= identity < 2**31, f"{what}.identity", identity, "a number of experts")
    _need(v["first"] in ("gate_up_proj", "up_proj"), f"{what}.first", v["first"], "gate_up_proj or up_proj")
    for key in ("gate_up", "down"):
        shape = v[key]
        _need(isinstance(shape, list) and len(shape) == 3 and all(type(d) is int and 0 < d < 2**40 for d in shape), f"{what}.{key}", shape, "[E, N, K]")
    (experts, rows, _), (others, _, inner) = v["gate_up"], v["down"]
    _need(experts == others and rows in (inner, 2 * inner), f"{what}.gate_up", v["gate_up"], f"[{others}, {inner} or {2 * inner}, K]")
    _need(isinstance(v["dtype"], str) and v["dtype"] in DTYPE_NAMES, f"{what}.dtype", v["dtype"], list(DTYPE_NAMES))
    _need(type(v["bias"]) is bool and type(v["dense"]) is bool, f"{what}.bias and .dense", (v["bias"], v["dense"]), "true or false")
    _need(isinstance(v["prefill"], str) and v["prefill"] in WEIGHT_ONLY, f"{what}.prefill", v["prefill"], list(WEIGHT_ONLY))
    act = v["activation"]
    right = (
        isinstance(act, dict) and set(act) == {"name", "alpha", "limit", "interleaved"} and isinstance(act["name"], str) and type(act["interleaved"]) is bool
    )
    right = right and type(act["alpha"]) in (int, float) and (act["limit"] is None or type(act["limit"]) in (int, float))
    _need(right, f"{what}.activation", act, "name, alpha, limit, interleaved")
    try:
        Activation(**act)
    except ConfigError as error:
        raise CheckpointError(f"{FILE}: {what}.activation: {error.what}", value=error.args[0], limit="an activation of fp4.moe", remedy=REWRITE) from error
    shapes: dict[str, Any] = {"gate_up": tuple(v["gate_up"]), "down": tuple(v["down"])}
    return ExpertsEntry(**{**v, **shapes, "input_scales": tuple(scales), "storages": tuple(storages)})


def _tensor(name: str, value: Any) -> TensorEntry:
    v = _fields(f"tensors[{name!r}]", value, TensorEntry)
    _need(isinstance(v["dtype"], str) and v["dtype"] in DTYPE_NAMES, f"tensors[{name!r}].dtype", v["dtype"], list(DTYPE_NAMES))
    _need(type(v["transposed"]) is bool, f"tensors[{name!r}].transposed", v["transposed"], "true or false")
    _storage(f"tensors[{name!r}]", v)
    return TensorEntry(**v)


def _storage(what: str, v: dict[str, Any]) -> None:
    name = v.get("storage", nvfp4.NAME)
    _need(isinstance(name, str) and name in STORAGES, f"{what}.storage", name, list(STORAGES))


def _file(name: str, value: Any, version: int) -> FileEntry:
    v = _fields(f"files[{name!r}]", value, FileEntry, "crc32" if version == _FIRST else "data_crc32")
    _need(type(v["bytes"]) is int and v["bytes"] >= 8, f"files[{name!r}].bytes", v["bytes"], "an integer >= 8")
    _need(isinstance(v["header_sha256"], str), f"files[{name!r}].header_sha256", v["header_sha256"], "text")
    if version == _FIRST:
        _need(type(v["data_crc32"]) is int, f"files[{name!r}].data_crc32", v["data_crc32"], "an integer")
    else:
        sums = v["crc32"]
        _need(isinstance(sums, dict) and all(type(s) is int for s in sums.values()), f"files[{name!r}].crc32", sums, "an object of integers")
    return FileEntry(**v)
