"""How often each pattern fired in this process."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_count: Counter[str] = Counter()


def matched(pattern: str) -> None:
    """Count one rewrite by ``pattern``."""
    with _lock:
        _count[pattern] += 1


def matches() -> dict[str, int]:
    """Rewrites since the last reset, ``{pattern: count}``, e.g. ``{"dequantize_mm": 14}``.

    A graph taken from a compile cache was rewritten when it was first compiled and is not counted again.
    """
    with _lock:
        return dict(_count)


def reset_matches() -> None:
    """Start counting from zero."""
    with _lock:
        _count.clear()
