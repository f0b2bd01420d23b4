"""Who knows that a compiled graph is called on one stream at a time: no two of its calls run at the same time, also not on two streams.

Torch promises nothing of the kind. An engine that launches all of a model's graphs on one stream (vLLM) does; what a graph then keeps from call to call is
its own. The lowerings ask here, and the keys of compile caches have the answer.
"""

from __future__ import annotations

from collections.abc import Callable

_providers: list[Callable[[], bool]] = []


def add_provider(provider: Callable[[], bool]) -> Callable[[], None]:
    """Ask ``provider`` whether the graph that this thread compiles now is called on one stream at a time. Returns a function that removes it.

    It is asked while a graph is rewritten and lowered and while a cache key is made, and has to say the same each time.
    """
    _providers.append(provider)

    def remove() -> None:
        _providers[:] = [p for p in _providers if p is not provider]

    return remove


def one_at_a_time() -> bool:
    """Is the graph that this thread compiles now called on one stream at a time?"""
    return any(provider() for provider in _providers)
