"""What :func:`fp4_inductor.inspect_checkpoint` finds in a checkpoint, and how it is shown."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from .._text import COLUMNS, group_names, wrap
from ..errors import FP4Error
from ..models.coverage import _bytes, _count

_SHOWN = 20


@dataclass(frozen=True)
class StoredTensor:
    """One weight, or one other tensor, as it lies on disk.

    Args:
        name: of a quantized weight, what its dense form is called in this checkpoint.
        format: ``"nvfp4"``, ``"sparse24_nvfp4"``, ``"mxfp4"`` or ``"fp8"`` of a quantized weight; else the name of a dtype, or of a ggml type.
        shape: of the weight, not of the tensors that it is packed into.
        bytes: of all that belongs to it on disk.
        quantized: it is stored in codes and scales that this package keeps packed.
        input_scale: a scale for activations comes with it.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    quantized: bool = False
    input_scale: bool = False

    @property
    def params(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointContents:
    """What :func:`fp4_inductor.inspect_checkpoint` found; ``str()`` of it is a table of at most 80 columns where names allow.

    Args:
        path: the folder or file.
        format: as in :class:`fp4_inductor.checkpoint.identify.Identity`; ``"unknown"`` if config.json is damaged.
        detail: the variant, and who wrote it.
        architecture: name of the model's class; empty if the checkpoint does not say.
        tensors: everything stored, quantized weights first.
        files: bytes of each file with weights.
        damage: what is wrong, one error each, with value, limit and remedy. Empty: nothing was found.
        read: every value was read, not only names and shapes.
        notes: what else a reader should know.
    """

    path: Path
    format: str
    detail: str = ""
    architecture: str = ""
    tensors: list[StoredTensor] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    damage: list[FP4Error] = field(default_factory=list)
    read: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[StoredTensor]:
        """The quantized weights."""
        return [t for t in self.tensors if t.quantized]

    @property
    def params(self) -> int:
        """Quantized weights, counted one by one."""
        return sum(t.params for t in self.quantized)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits on disk of a quantized weight, scales included; 0.0 if there are none."""
        return 8 * sum(t.bytes for t in self.quantized) / self.params if self.params else 0.0

    def __str__(self) -> str:
        return self.table()

    def table(self, every: bool = False, width: int = COLUMNS) -> str:
        """The table. ``every``: one line for each tensor; else tensors of one format and shape share a line if their names are those of repeated parts."""
        rest = [t for t in self.tensors if not t.quantized]
        lines = [
            str(self.path),
            f"  format      {self.format}{f' ({self.detail})' if self.detail else ''}",
            *([f"  model       {self.architecture}"] if self.architecture else []),
            f"  files       {len(self.files)}, {_bytes(sum(self.files.values()))}",
            f"  quantized   {_summary(self.quantized)}{f', {self.bits_per_weight:.2f} bits a weight' if self.params else ''}",
            f"  other       {_summary(rest)}",
        ]
        scales = sum(t.input_scale for t in self.quantized)
        lines += [f"  inputs      {scales} of {len(self.quantized)} layers have a scale for their activations"] if scales else []
        lines += ["", *(_rows(self.tensors, every, width) if self.tensors else []), *([""] if self.tensors else [])]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *(part for line in self._verdict() for part in _wrapped(line, width))])

    def _verdict(self) -> list[str]:
        if not self.damage:
            checked = "every value was read" if self.read else "names, shapes and sizes only: no value was read"
            return [f"  no damage found ({checked})"]
        lines = [f"  DAMAGED: {len(self.damage)} {'problem' if len(self.damage) == 1 else 'problems'}"]
        for error in self.damage[:_SHOWN]:
            lines += [f"    {error.what}", *([f"      found {error.value}; expected {error.limit}"] if error.value is not None else [])]
        lines += [f"    ... and {len(self.damage) - _SHOWN} more"] if len(self.damage) > _SHOWN else []
        return lines + [f"  {remedy}" for remedy in dict.fromkeys(e.remedy for e in self.damage) if remedy]


def _summary(tensors: list[StoredTensor]) -> str:
    if not tensors:
        return "nothing"
    return f"{len(tensors)} tensors, {_count(sum(t.params for t in tensors))} values, {_bytes(sum(t.bytes for t in tensors))}"


def _rows(tensors: list[StoredTensor], every: bool, width: int) -> list[str]:
    """A line for each kind of tensor; a name that does not fit stands on a line of its own."""
    names: dict[tuple, list[str]] = defaultdict(list)
    for t in sorted(tensors, key=lambda t: (not t.quantized, _natural(t.name))):
        names[t.format, t.shape, t.bytes, t.name if every else ""].append(t.name)
    cells = []
    for (kind, shape, size, _), alike in names.items():
        groups = group_names(alike)
        cells += [(str(count), kind, "x".join(map(str, shape)) or "1", _bytes(size), name) for name, count in groups]
    table = [("count", "format", "shape", "each", "name"), *cells]
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = []
    for count, kind, shape, size, name in table:
        line = f"  {count:>{widths[0]}}  {kind:{widths[1]}}  {shape:{widths[2]}}  {size:>{widths[3]}}"
        margin = " " * (widths[0] + 4)
        lines += [f"{line}  {name}"] if len(line) + 2 + len(name) <= width else [line, *wrap(name, width, margin, margin)]
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
