"""Notes that a compilation leaves for whoever listens: what was lowered, what a pass left dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Journal(Generic[Entry]):
    """Entries go to the innermost listener; without one they are dropped."""

    def __init__(self) -> None:
        self._entries: list[Entry] | None = None

    def record(self, entry: Entry) -> Entry:
        """Append ``entry`` if someone is listening."""
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
