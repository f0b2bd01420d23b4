"""Functions that are compiled, or run as they are where that is not possible."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["Compiled", "is_compile_error", "merge_untimed", "own_code"]


def is_compile_error(error: BaseException) -> bool:
    """True for what Dynamo or a backend raises before any of the compiled code has run."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException)


def own_code(function: Callable) -> Callable:
    """``function`` with a code object of its own: Dynamo counts recompilations by code object, gives up at eight, and counts those of others, too."""
    code: types.CodeType = function.__code__.replace()  # type: ignore[attr-defined]
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)  # type: ignore[attr-defined]
    copy.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    return copy


def merge_untimed() -> None:
    """Let Inductor merge small kernels of the graph that it compiles now (combo kernels) without timing them. Ends with the caller's patch of its config."""
    from torch._inductor import config

    config.benchmark_combo_kernel = False


class Compiled:
    """A function that is compiled when it is first called, or runs as it is if that fails, with a note. ``within``: makes the context of each call."""

    def __init__(self, function: Callable, compiled: bool, name: str, within: Callable[[], Any] = nullcontext):
        self.plain, self.name, self.within = function, name, within
        self.note: str | None = None
        self.run = torch.compile(own_code(function), fullgraph=True) if compiled else function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is self.plain:
            return self.plain(*args, **kwargs)
        try:
            with self.within():
                return self.run(*args, **kwargs)
        except Exception as error:
            if not is_compile_error(error):
                raise
            self.run = self.plain
            self.note = f"{self.name} is not compiled: {_reason_of(error)}"
            return self.plain(*args, **kwargs)


def _reason_of(error: Exception) -> str:
    """What a compiler's error says: its first line, the one behind it where the first only names who raised, and where Dynamo stopped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    where = [line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context:")]
    return f"{said} ({where[0]})" if where and where[0] else said
