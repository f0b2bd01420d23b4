"""Reading safetensors files that may lie: the whole header is proved consistent before a byte of data is used.

Source: https://github.com/huggingface/safetensors#format. Own parser instead of the library's so that every refusal
names the file, the tensor, the value and the limit, and so that tensors own their memory (the library maps the file:
truncating it later would crash the process).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_HEADER_LIMIT = 100_000_000  # as in the safetensors library
_CHUNK = 1 << 24
_READ_AT_ONCE = 1 << 30  # Linux reads at most 2 GB a call
_STAGED = 32 << 20  # bytes on their way to a GPU, page-locked, a thread
_LENGTH_BYTES = 8
_INCOMPLETE = "The file is incomplete or damaged: write or download it again."
_DAMAGED = "The weights are damaged: copy the checkpoint again, or quantize the model again."
_FOREIGN = "No safetensors writer makes such a file: write it again, or get it from a source you trust."


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``start``, ``end``: byte offsets in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The proved header of one file. ``digest``: SHA-256 of its bytes, in hex."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    size: int
    digest: str


def read_header(path: Path) -> Header:
    """Read and prove the header of a safetensors file.

    Raises:
        CheckpointError: truncated, oversized or non-JSON header, duplicate names, unknown dtype, negative dimension,
            offsets out of range, overlapping or leaving holes, or not matching dtype and shape.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw_length = file.read(_LENGTH_BYTES)
        if len(raw_length) < _LENGTH_BYTES:
            raise CheckpointError(f"{path.name} is too short for a safetensors file", value=f"{size} bytes", limit=">= 8", remedy=_INCOMPLETE)
        length = int.from_bytes(raw_length, "little")
        limit = min(_HEADER_LIMIT, size - _LENGTH_BYTES)
        if length > limit:
            raise CheckpointError(f"{path.name}: the header is longer than the file or the limit", value=length, limit=f"<= {limit} bytes", remedy=_INCOMPLETE)
        raw = file.read(length)
    if len(raw) != length:
        raise CheckpointError(f"{path.name}: the header is truncated", value=len(raw), limit=f"{length} bytes", remedy=_INCOMPLETE)
    fields = parse_json(raw, path.name)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path.name}: __metadata__ is not valid", value=repr(metadata)[:200], limit="an object of text", remedy=_FOREIGN)
    begin = _LENGTH_BYTES + length
    entries = {name: _entry(path, name, value, begin, size) for name, value in fields.items()}
    _no_gaps(path, entries, begin, size)
    return Header(entries, metadata, size, hashlib.sha256(raw).hexdigest())


def require_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device, which reading would wait for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path.name} is no file", value=str(path), limit="a regular file", remedy="Copy the checkpoint again.")


def data_crc32(path: Path) -> int:
    """CRC-32 of everything behind the header of a file that :func:`read_header` accepts. Native checkpoints of version 1."""
    crc = 0
    with _opened(path) as file:
        file.seek(_LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little"))
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def crc32(t: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous CPU tensor, at about 7 GB/s."""
    return zlib.crc32(t.detach().reshape(-1).view(torch.uint8).numpy().data) if t.numel() else 0


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object, or CheckpointError. A key that occurs twice is an error: readers would disagree on its value."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
            raise CheckpointError(f"{what}: a name occurs twice", value=twice[:200], limit="every name once", remedy=_FOREIGN)
        return out

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON", value=f"{type(error).__name__}: {error}", limit="UTF-8 JSON", remedy=_INCOMPLETE) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object", value=type(value).__name__, limit="an object", remedy=_INCOMPLETE)
    return value


class Reader:
    """Reads the tensors of several files. Threads may share one."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def read(self, entry: Entry, crc32: int | None = None, device: torch.device | None = None) -> Tensor:
        """The tensor in memory of its own, on the CPU or on a CUDA ``device``: there through page-locked memory that is used again, since
        fresh memory costs more than reading into it. ``crc32``: what its bytes must sum up to; None where nobody recorded it.
        """
        raw = torch.empty(entry.end - entry.start, dtype=torch.uint8, device=device)
        staging = self._staging() if raw.is_cuda else None
        got = is_now = 0
        try:
            fd = self._open(entry.path)
            while got < raw.numel():
                part = raw[got : got + _READ_AT_ONCE] if staging is None else staging[: raw.numel() - got]
                view = memoryview(part.numpy().data)
                n = os.preadv(fd, [view], entry.start + got)
                if not n:
                    break
                is_now = zlib.crc32(view[:n], is_now) if crc32 is not None else 0
                if staging is not None:
                    raw[got : got + n].copy_(staging[:n], non_blocking=True)
                    torch.cuda.current_stream(raw.device).synchronize()
                got += n
        except OSError as error:
            raise CheckpointError(
                f"{entry.name} cannot be read from {entry.path.name}",
                value=str(error),
                limit="a readable file",
                remedy="Check its permissions and its disk, and that nobody replaces the checkpoint meanwhile.",
            ) from error
        if got != raw.numel():
            raise CheckpointError(f"{entry.name} is truncated in {entry.path.name}", value=got, limit=f"{raw.numel()} bytes", remedy=_INCOMPLETE)
        if crc32 is not None and is_now != crc32:
            raise CheckpointError(
                f"{entry.path.name}: {entry.name} was altered since it was saved", value=f"CRC-32 {is_now:08x}", limit=f"{crc32:08x}", remedy=_DAMAGED
            )
        if entry.dtype == torch.bool and bool((raw > 1).any()):
            raise CheckpointError(f"{entry.name} is BOOL with bytes other than 0 and 1", value=int(raw.max()), limit="0, 1", remedy=_INCOMPLETE)
        return raw.view(entry.dtype).reshape(entry.shape)

    def _staging(self) -> Tensor:
        """Of the calling thread."""
        if not hasattr(self._own, "staging"):
            self._own.staging = torch.empty(_STAGED, dtype=torch.uint8, pin_memory=True)
        return self._own.staging

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._files[path]


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        require_file(path)
        file = open(path, "rb")  # noqa: SIM115 - closed by the with below; only opening is translated
    except OSError as error:
        remedy = "Copy the missing file to the others, or correct its permissions."
        raise CheckpointError(f"{path.name} cannot be opened", value=f"{error.strerror}: {path}", limit="a readable file", remedy=remedy) from error
    with file:
        yield file


def _entry(path: Path, name: str, value: Any, begin: int, size: int) -> Entry:
    where = f"{path.name}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described", value=repr(value)[:200], limit="an object of dtype, shape and data_offsets", remedy=_FOREIGN)
    shape, offsets = value["shape"], value["data_offsets"]
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where} has an unknown dtype", value=repr(value["dtype"])[:80], limit=list(DTYPES), remedy="Cast it before saving.")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where} has an invalid shape", value=repr(shape)[:200], limit="a list of integers >= 0", remedy=_FOREIGN)
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - begin:
        raise CheckpointError(
            f"{where} has invalid data_offsets", value=repr(offsets)[:200], limit=f"[start, end] within {size - begin} bytes", remedy=_INCOMPLETE
        )
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{where}: dtype and shape do not fit its bytes", value=offsets[1] - offsets[0], limit=f"{needed} bytes for {dtype} {shape}", remedy=_FOREIGN
        )
    return Entry(name, dtype, tuple(shape), path, begin + offsets[0], begin + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _no_gaps(path: Path, entries: dict[str, Entry], begin: int, size: int) -> None:
    at = begin
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != at:
            kind = "overlaps the tensor before it" if entry.start < at else "leaves a hole before it"
            raise CheckpointError(f"{path.name}: {entry.name} {kind}", value=entry.start - begin, limit=f"offset {at - begin}", remedy=_FOREIGN)
        at = entry.end
    if at != size:
        raise CheckpointError(f"{path.name}: bytes after the last tensor", value=size - at, limit=0, remedy=_FOREIGN)
