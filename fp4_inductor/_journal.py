"""Notes that a compilation leaves for whoever listens: what was lowered, what a pass left dense."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class Journal(Generic[Entry]):
    """Entries go to the innermost listener, and the last ``keep`` of the process are kept; without either they are dropped."""

    def __init__(self, keep: int = 0) -> None:
        self._entries: list[Entry] | None = None
        self.kept: deque[Entry] = deque(maxlen=keep)
        self._seen = 0

    @property
    def dropped(self) -> int:
        """How many of the oldest entries are not kept any more."""
        return self._seen - len(self.kept)

    def forget(self) -> None:
        """Keep none of the entries so far."""
        self.kept.clear()
        self._seen = 0

    def record(self, entry: Entry) -> Entry:
        """Append ``entry``."""
        self.kept.append(entry)
        self._seen += 1
        if self._entries is not None:
            self._entries.append(entry)
        return entry

    @contextmanager
    def listen(self) -> Iterator[list[Entry]]:
        """``with listen() as entries:`` collects what is recorded inside."""
        outer, self._entries = self._entries, []
        try:
            yield self._entries
        finally:
            self._entries = outer


# Of lowerings/journal.py and passes/missed.py; here, so that they can be read where Inductor was never imported.
LOWERED: Journal[Any] = Journal(keep=4096)
LEFT_DENSE: Journal[Any] = Journal(keep=256)
