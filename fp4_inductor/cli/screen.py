"""What the user sees: results on stdout, as text or JSON; progress, warnings and errors on stderr."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

import torch

PROGRAM = "fp4-inductor"
_BAR_AFTER = 1.0  # seconds: what is done sooner needs no bar
_LOG_EVERY = 10.0  # seconds between two states of a bar in a file


class Screen:
    """Where a command writes to.

    Args:
        as_json: results are one JSON object.
        quiet: no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        self.out: TextIO = sys.stdout

    def say(self, text: str) -> None:
        """One line of progress."""
        if not self.quiet:
            _to_stderr(text)

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """The result: ``text`` for people, ``data`` as JSON."""
        print(json.dumps(plain(data)) if self.as_json else text, file=self.out, flush=True)

    def error(self, text: str, kind: str = "error") -> None:
        """A message, its lines wrapped."""
        _to_stderr(wrapped(f"{PROGRAM}: {kind}: {text}"))

    @contextmanager
    def working(self) -> Iterator[None]:
        """While libraries work: what they print goes to stderr, their bars wait a second, warnings are one message each."""
        with redirect_stdout(sys.stderr), warnings.catch_warnings(), _bars(self.quiet):
            for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.showwarning = lambda message, *_, **__: self.error(str(message), "warning")
            yield


def _to_stderr(text: str) -> None:
    with suppress(OSError):  # closed, or on a full disk: the exit status still tells
        print(text, file=sys.stderr, flush=True)


def columns() -> int:
    """Columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def wrapped(text: str) -> str:
    """``text`` in lines that fit the terminal; what continues a line is indented by two more."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        fill = textwrap.TextWrapper(max(columns(), 40), subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
        lines += fill.wrap(line) or [""]
    return "\n".join(lines)


@contextmanager
def _bars(quiet: bool) -> Iterator[None]:
    """Every bar of tqdm, whoever makes it: none if ``quiet``, none for what is done at once, few lines in a file."""
    from tqdm.std import tqdm

    original = tqdm.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("delay", _BAR_AFTER)
        if quiet:
            kwargs["disable"] = True
        if not sys.stderr.isatty():
            kwargs.setdefault("mininterval", _LOG_EVERY)
        original(self, *args, **kwargs)

    tqdm.__init__ = init
    try:
        yield
    finally:
        tqdm.__init__ = original


def plain(value: Any) -> Any:
    """``value`` in the types of JSON: dataclasses are objects, NaN and infinities are null, everything else is text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, torch.Size)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, BaseException):
        parts = {name: plain(getattr(value, name, None)) for name in ("what", "value", "limit", "remedy")}
        return {"type": type(value).__name__, "message": str(value), **parts}
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
