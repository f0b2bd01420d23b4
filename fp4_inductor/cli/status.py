"""Exit statuses, and how every way in which a command can end becomes one."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..errors import FP4Error
from .screen import Screen

OK, FAILED, MISTAKE, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130
STATUSES = {
    OK: "done",
    FAILED: "a check failed: damage, no loading, a figure above its limit",
    MISTAKE: "wrong arguments or files, no space, no memory: see the message",
    INTERNAL: "an error of this program",
    INTERRUPTED: "interrupted by Ctrl-C",
}
_BROKEN_PIPE = 128 + signal.SIGPIPE
_EXTRAS = {"transformers", "accelerate", "gguf", "tokenizers", "huggingface_hub", "sentencepiece", "jinja2"}
_NO_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory", re.IGNORECASE)
# A Python argument in a remedy: name=value.
_ARGUMENT = re.compile(r"\b([a-z_]+)=(\"[^\"]*\"|\[[^\]]*\]|True|False|[\w.]+)?")


def run_guarded(do: Callable[[], int], screen: Screen, args: argparse.Namespace) -> int:
    """``do()``, which returns an exit status; whatever it raises becomes a message and a status. Only ``--traceback`` shows where."""
    received: list[int] = []
    try:
        with _stopped_by_signals(received):
            return do()
    except KeyboardInterrupt as stopped:
        number = received[0] if received else signal.SIGINT
        return _end(screen, args, stopped, _interrupted(args), 128 + number)
    except BrokenPipeError:  # whoever reads stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except FP4Error as error:
        return _end(screen, args, error, text_of(error, args), MISTAKE)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRAS:
            return _internal(screen, args, error)
        return _end(screen, args, error, f"this needs the package {error.name}, which is not installed\n  Run pip install 'fp4_inductor[models]'.", MISTAKE)
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        return _end(screen, args, error, f"{error.strerror or error}{named}", MISTAKE)
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
            text = f"out of memory: {str(error).splitlines()[0] if str(error) else 'the machine has no more'}\n  Use a larger device, or --device cpu."
            return _end(screen, args, error, text, MISTAKE)
        return _internal(screen, args, error)


def _interrupted(args: argparse.Namespace) -> str:
    folder = getattr(args, "checkpoint_dir", None)
    return "interrupted; nothing half-written is left" + (f". The same command goes on with the layers in {folder}" if folder else "")


def _internal(screen: Screen, args: argparse.Namespace, error: BaseException) -> int:
    text = f"{type(error).__name__}: {error}\n  This is an error of the program. --traceback shows where; please report it with the command."
    return _end(screen, args, error, text, INTERNAL)


def _end(screen: Screen, args: argparse.Namespace, error: BaseException, text: str, status: int) -> int:
    if args.traceback:
        traceback.print_exception(error)
    screen.error(text)
    if screen.as_json and not isinstance(error, KeyboardInterrupt):
        screen.result("", {"error": error, "status": status})
    return status


def text_of(error: FP4Error, args: argparse.Namespace) -> str:
    """An error in lines: what, value, limit, remedy. Arguments of functions in the remedy become options where the command has them."""
    lines = [error.what.rstrip()]
    lines += [f"  got:      {error.value}"] if error.value is not None else []
    lines += [f"  accepted: {error.limit}"] if error.limit is not None else []
    lines += [f"  {_as_options(error.remedy, set(vars(args)))}"] if error.remedy else []
    return "\n".join(lines)


def _as_options(remedy: str, known: set[str]) -> str:
    def option(found: re.Match) -> str:
        name, value = found[1], found[2] or ""
        if name not in known:
            return found[0]
        flag = f"--{'no-' if value == 'False' else ''}{name.replace('_', '-')}"
        if value in ("True", "False", ""):
            return flag
        return f"{flag} {'...' if value.startswith('[') else value.strip(chr(34))}"

    return _ARGUMENT.sub(option, remedy)


@contextmanager
def _stopped_by_signals(received: list[int]) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: what is half-written is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        received.append(number)
        signal.default_int_handler(number, None)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
