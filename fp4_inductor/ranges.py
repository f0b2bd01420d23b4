"""What a caller promises about the size that is dynamic in the graphs it compiles: ``low <= size <= high``.

A compiler that drops Dynamo's guards and compiles a graph once for each range of sizes (vLLM does) is the only one that knows
which sizes a graph will meet. The lowerings ask here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple

from .config import without
from .errors import ConfigError


class Range(NamedTuple):
    """``low <= size``, and ``size <= high`` unless that is None."""

    low: int
    high: int | None

    def __str__(self) -> str:
        return f"compile_range({self.low}, {self.high})"


_blocks: ContextVar[tuple[compile_range, ...]] = ContextVar("fp4_inductor_compile_range", default=())
_providers: list[Callable[[], Any]] = []


class compile_range(ContextDecorator):  # noqa: N801  (a context manager, used like a function)
    """Context manager: the graphs compiled inside are called with sizes from ``low`` to ``high`` only.

    It is about graphs with one dynamic size: the number of tokens, in a decoder. M of each quantized call (the rows of its activation)
    follows from that size, and the kernel of a call is chosen for the whole range (``decision`` is ``"proven"``) if one kernel serves it.
    If several do, the choice is left to each call (``"runtime"``), or a guard is added where Dynamo checks guards. Make ranges that end where
    kernels change with :func:`fp4_inductor.bounds`.

    The range replaces what torch knows of the size: torch takes 2 for the least value of a dynamic size, and ``compile_range(1, 16)`` may
    be called with 1. A graph with several dynamic sizes is not covered. A call outside of the range is a
    :class:`fp4_inductor.errors.RowsError` if it needs another kernel. The range takes part in the keys of torch's compile caches and in
    :func:`fp4_inductor.cache_salt`.

    It holds for the current thread (the current ``contextvars.Context``). Blocks nest; the innermost counts.

    Args:
        low: the least size, at least 0.
        high: the largest size; None: no limit.

    Raises:
        fp4_inductor.errors.ConfigError: they are no integers, or not ``0 <= low <= high``.

    Example, a graph for decoding and one for prompts::

        for low, high in ((1, 16), (17, 8192)):
            with fp4_inductor.compile_range(low, high):
                compiled[low, high] = torch._inductor.standalone_compile(graph, inputs, dynamic_shapes="from_graph")
    """

    def __init__(self, low: int, high: int | None = None):
        self._range = _checked((low, high), "compile_range")

    def __enter__(self) -> Range:
        _blocks.set((*_blocks.get(), self))
        return self._range

    def __exit__(self, *error: object) -> None:
        _blocks.set(without(_blocks.get(), self))

    def _recreate_cm(self) -> compile_range:
        return compile_range(*self._range)


def add_range_provider(provider: Callable[[], tuple[int, int | None] | None]) -> Callable[[], None]:
    """Ask ``provider`` for the range of what is being compiled, as :func:`fp4_inductor.compile_range` would give it.

    It is called without arguments, in the thread that compiles, while a graph is lowered and while a cache key is made, and has to return
    the same both times. It returns ``(low, high)``, ``high`` None for no limit, or None if it knows nothing. A
    ``compile_range`` block counts before providers, and a provider before those that were added later.

    Args:
        provider: the function to ask.

    Returns:
        A function without arguments that removes the provider.

    Raises:
        fp4_inductor.errors.ConfigError: ``provider`` cannot be called. A compilation raises it if a provider returns something else than a
            range; an error of the provider itself ends the compilation.
    """
    if not callable(provider):
        raise ConfigError("a range provider is not a function", value=repr(provider), limit="a callable without arguments", remedy="Pass lambda: (low, high).")
    _providers.append(provider)

    def remove() -> None:
        _providers[:] = [p for p in _providers if p is not provider]

    return remove


def range_in_force() -> Range | None:
    """What is promised of the graph that this thread compiles now; None: nothing."""
    blocks = _blocks.get()
    if blocks:
        return blocks[-1]._range
    for provider in tuple(_providers):
        given = provider()
        if given is not None:
            return _checked(given, f"the range provider {getattr(provider, '__qualname__', provider)!s}")
    return None


def _checked(given: Any, who: str) -> Range:
    try:
        low, high = given
        found = Range(operator.index(low), None if high is None else operator.index(high))
    except (TypeError, ValueError):
        found = Range(-1, None)
    if found.low < 0 or (found.high is not None and found.high < found.low):
        raise ConfigError(
            f"{who} gives no range of sizes",
            value=repr(given),
            limit="(low, high), integers with 0 <= low <= high; high may be None",
            remedy="Give the least and the largest number of tokens that the graph will be called with.",
        )
    return found
