"""What the lowerings decided, for explain(): one entry per quantized call, appended while a graph is being lowered."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._journal import Journal
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


_journal: Journal[Entry] = Journal()
record, listen = _journal.record, _journal.listen
