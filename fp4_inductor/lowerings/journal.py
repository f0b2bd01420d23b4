"""What the lowerings decided, for explain(): one entry per quantized call, appended while a graph is being lowered."""

from __future__ import annotations

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
    buffer: str | None = None
    epilogue: list[str] = field(default_factory=list)


_entries: list[Entry] | None = None


def record(entry: Entry) -> Entry:
    """Append ``entry`` if someone is listening."""
    if _entries is not None:
        _entries.append(entry)
    return entry


class listen:  # noqa: N801 - used as a context manager, like a function
    """``with listen() as entries:`` collects what is lowered inside."""

    def __enter__(self) -> list[Entry]:
        global _entries
        self.previous = _entries
        _entries = []
        return _entries

    def __exit__(self, *exc) -> None:
        global _entries
        _entries = self.previous
