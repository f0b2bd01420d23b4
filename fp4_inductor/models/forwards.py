"""Modules that run something else for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def replaced_forwards() -> Iterator[Callable[[nn.Module, Callable], None]]:
    """Gives a function that sets the ``forward`` of a module; afterwards each module has what it had.

    It is set on the instance: whatever the module's ``__call__`` does around ``forward`` stays.
    """
    replaced: list[tuple[nn.Module, Callable | None]] = []

    def replace(module: nn.Module, forward: Callable) -> None:
        replaced.append((module, vars(module).get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    try:
        yield replace
    finally:
        for module, own in reversed(replaced):
            if own is None:
                del module.forward
            else:
                module.forward = own  # type: ignore[method-assign]
