"""The header of a GGUF file that may lie: proved consistent before a byte of data is used, and before other code sees the file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Own parser because
gguf-py trusts its input: an array that claims 2**60 elements keeps it busy for ever.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_DEPTH = 4  # arrays of arrays
_DIMENSIONS = 4
# value type -> struct code, in the order of the specification; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REMEDY = "Download the file again, or convert the original model."


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: ``shape`` in the order of torch (slowest first), ``kind``: the number of its ggml type, ``start``, ``end``: bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """``fields``: metadata by key; arrays as lists."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def field(self, name: str, default: Any = None) -> Any:
        """``<architecture>.<name>``."""
        return self.fields.get(f"{self.architecture}.{name}", default)


def read_gguf(path: str | os.PathLike, sizes: Mapping[int, tuple[int, int]]) -> GGUFFile:
    """Parse and prove the header.

    Args:
        path: the file.
        sizes: ggml type -> (weights, bytes) of one block.

    Raises:
        CheckpointError: no GGUF file, truncated, or a header that cannot be true.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return _Parser(path, file, os.fstat(file.fileno()).st_size, sizes).file()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be opened", value=f"{error.strerror}: {path}", limit="a readable file", remedy=_REMEDY) from error


def begins_as_gguf(path: Path) -> bool:
    """The first bytes of a file are those of GGUF files."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be opened", value=f"{error.strerror}: {path}", limit="a readable file", remedy=_REMEDY) from error


def block_sizes() -> dict[int, tuple[int, int]]:
    """``{ggml type: (weights, bytes) of one block}`` of the types that the gguf package knows.

    Raises:
        CheckpointError: no gguf package.
    """
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the gguf package", value=str(error), limit="gguf >= 0.17", remedy="Run pip install gguf.") from error
    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """:func:`read_gguf` with :func:`block_sizes`; raises what both raise."""
    return read_gguf(path, block_sizes())


class _Parser:
    def __init__(self, path: Path, stream: BufferedReader, size: int, sizes: Mapping[int, tuple[int, int]]):
        self.path, self.stream, self.size, self.sizes, self.at = path, stream, size, sizes, 0

    def file(self) -> GGUFFile:
        magic = self.take(4)
        if magic != _MAGIC:
            raise self.wrong("no GGUF file", magic, _MAGIC)
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise self.wrong("a GGUF version that is not known", version, _VERSIONS)
        tensors, pairs = self.scalar("Q"), self.scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(self.count(pairs, 13, "metadata pairs")):
            key = self.string()
            if key in fields:
                raise self.wrong("a key twice", key, "once")
            fields[key] = self.value(self.scalar("I"), 0)
        infos = [self.tensor() for _ in range(self.count(tensors, 32, "tensors"))]
        return GGUFFile(self.path, fields, self.placed(infos, fields.get("general.alignment", _ALIGNMENT)))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = self.scalar("I")
        if not 0 < dims <= _DIMENSIONS:
            raise self.wrong(f"{name}: number of dimensions", dims, f"1 to {_DIMENSIONS}")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, GGUFTensor]:
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self.wrong("general.alignment", alignment, "a power of two")
        data = self.at + -self.at % alignment
        out: dict[str, GGUFTensor] = {}
        end = expected = 0
        for name, shape, kind, offset in infos:
            if name in out:
                raise self.wrong("a tensor twice", name, "once")
            if kind not in self.sizes:
                raise self.wrong(f"{name}: a type that is not known", kind, f"one of {len(self.sizes)} ggml types; or update the gguf package")
            weights, bytes_ = self.sizes[kind]
            if shape[-1] % weights:
                raise self.wrong(f"{name}: rows of whole blocks", shape, f"a multiple of {weights}")
            if offset != expected:  # as llama.cpp demands: else another type or shape would go unnoticed
                raise self.wrong(f"{name} is not where the tensor before it ends", offset, expected)
            end = offset + math.prod(shape) // weights * bytes_
            expected = end + -end % alignment
            out[name] = GGUFTensor(name, shape, kind, data + offset, data + end)
        if not data + end <= self.size <= max(data + expected, self.at):
            raise self.wrong("truncated, or bytes after the last tensor", f"{self.size} bytes", f"{data + end} to {data + expected}")
        return out

    def value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth >= _DEPTH:
                raise self.wrong("arrays in arrays", depth, f"<= {_DEPTH}")
            of, n = self.scalar("I"), self.scalar("Q")
            if of in _SCALARS:
                n = self.count(n, struct.calcsize(_SCALARS[of]), "elements")
                return list(struct.unpack(f"<{n}{_SCALARS[of]}", self.take(n * struct.calcsize(_SCALARS[of]))))
            return [self.value(of, depth + 1) for _ in range(self.count(n, 8, "elements"))]
        if kind not in _SCALARS:
            raise self.wrong("a value type that is not known", kind, "0 to 12")
        return self.scalar(_SCALARS[kind])

    def string(self) -> str:
        n = self.count(self.scalar("Q"), 1, "characters")
        try:
            return self.take(n).decode()
        except UnicodeDecodeError as error:
            raise self.wrong("text that is no UTF-8", str(error), "UTF-8") from error

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def count(self, n: int, each: int, what: str) -> int:
        """``n`` things of at least ``each`` bytes still to come."""
        left = self.size - self.at
        if n > left // each:
            raise self.wrong(f"more {what} than the file has room for", n, f"{left} bytes left")
        return n

    def take(self, n: int) -> bytes:
        found = self.stream.read(n) if self.at + n <= self.size else b""
        if len(found) != n:
            raise self.wrong("a truncated header", f"{self.size} bytes", f">= {self.at + n}")
        self.at += n
        return found

    def wrong(self, what: str, value: object, limit: object) -> CheckpointError:
        return CheckpointError(f"{self.path.name}: {what}", value=value, limit=limit, remedy=_REMEDY)
