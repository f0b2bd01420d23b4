"""One line on stderr for the person who waits: what takes more than two seconds, and how long it took.

``FP4_INDUCTOR_QUIET=1`` leaves the lines out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

LONG = 2.0  # seconds


def say(text: str) -> None:
    """Write one line to stderr."""
    if not os.environ.get("FP4_INDUCTOR_QUIET"):
        print(f"fp4_inductor: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(what: str, after: float = LONG) -> Iterator[None]:
    """Say ``what`` if the block takes longer than ``after`` seconds, and at its end how long it took."""
    said = threading.Event()

    def tell() -> None:
        said.set()
        say(f"{what} ...")

    timer = threading.Timer(after, tell)
    timer.daemon = True
    begin = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            say(f"{what}: {time.monotonic() - begin:.0f} s")
