"""What the lowerings decided, for explain(): one entry per quantized call, appended while a graph is being lowered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..kernels.select import Refused
from .regime import Decision


@dataclass
class Entry:
    """One quantized call in one graph."""

    op: str
    node: str
    module: str
    m: str
    n: int
    k: int
    dtype: str
    decision: Decision
    refused: tuple[Refused, ...]
    arch: int
    experts: int = 1
    buffer: str | None = None
    epilogue: list[str] = field(default_factory=list)
    note: str = ""


_entries: list[Entry] | None = None


def record(entry: Entry) -> Entry:
    """Append ``entry`` if someone is listening."""
    if _entries is not None:
        _entries.append(entry)
    return entry


@contextmanager
def listen() -> Iterator[list[Entry]]:
    """``with listen() as entries:`` collects what is lowered inside."""
    global _entries
    outer, _entries = _entries, []
    try:
        yield _entries
    finally:
        _entries = outer
