"""Files are written into a folder aside and renamed when all are complete: a reader never finds half a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, ConfigError


def as_path(value: Any, what: str) -> Path:
    """``value`` as a path; ConfigError unless it is text or a path."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"{what} is no path", value=repr(value)[:80], limit="a path, as str or os.PathLike", remedy="Name the checkpoint's folder.")
    return Path(value)


def said_by(error: Exception) -> str:
    """What the system says of a file that could not be written; else the error."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


@contextmanager
def written_aside(directory: Path, size: int) -> Iterator[Path]:
    """An empty folder inside ``directory``, to write files into and :func:`publish` them from.

    If the block raises, Ctrl-C included, the folder goes, and so do the directories that were created for it.

    Args:
        size: bytes of tensors to be written, for the message.

    Raises:
        CheckpointError: ``directory`` cannot be created or written to, or there is no space.
    """
    created: list[Path] = []
    aside: Path | None = None
    finished = False
    try:
        created = [p for p in (directory, *directory.parents) if not p.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".fp4_inductor-", dir=directory))
        yield aside
        finished = True
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the checkpoint cannot be written",
            value=f"{said_by(error)}: {directory}",
            limit=f"a directory you may write to, with space for {size} bytes of tensors",
            remedy="Choose another directory, or correct its permissions; nothing was left there.",
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if not finished:
            _remove_empty(created)


def _remove_empty(directories: list[Path]) -> None:
    """Remove ``directories``, deepest first, until one holds something."""
    try:
        for directory in directories:
            directory.rmdir()
    except OSError:
        return


def publish(aside: Path, directory: Path, last: str, is_stale: Callable[[str], bool] = lambda name: False) -> None:
    """Move the finished files of ``aside`` into ``directory``; Ctrl-C and SIGTERM wait until that is done.

    Args:
        last: the file without which nothing is a checkpoint: it goes first and comes back last.
        is_stale: names of an earlier checkpoint's files, which go.
    """
    files = sorted(p.name for p in aside.iterdir() if p.is_file())
    for name in files:
        shutil.copymode(aside / last, aside / name)  # safetensors writes 0600 whatever the umask says
        with open(aside / name, "rb") as file:
            os.fsync(file.fileno())
    with _uninterrupted():
        (directory / last).unlink(missing_ok=True)
        for old in directory.iterdir():
            if old.name not in files and not old.is_dir() and is_stale(old.name):
                old.unlink()
        for name in sorted(files, key=lambda n: n == last):
            os.replace(aside / name, directory / name)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM, which only a main thread receives, until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda received, _: held.append(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which Python cannot put back.
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler if handler is not None else default)
    if held:
        signal.raise_signal(held[0])
