"""What an engine that compiles and runs a model's graphs (vLLM) promises of them, and torch does not:

* a graph is called on one stream at a time: no two of its calls run at the same time, also not on two streams;
* what runs before a graph on its stream writes none of the weights that the graph reads.

The passes and lowerings ask here, and the keys of compile caches have the answer.
"""

from __future__ import annotations

from collections.abc import Callable

_providers: list[Callable[[], bool]] = []


def add_provider(provider: Callable[[], bool]) -> Callable[[], None]:
    """Ask ``provider`` whether the graph that this thread compiles now is such an engine's. Returns a function that removes it.

    It is asked while a graph is rewritten and lowered and while a cache key is made, and has to say the same each time.
    """
    _providers.append(provider)

    def remove() -> None:
        _providers[:] = [p for p in _providers if p is not provider]

    return remove


def compiles() -> bool:
    """Is the graph that this thread compiles now that of such an engine?"""
    return any(provider() for provider in _providers)
