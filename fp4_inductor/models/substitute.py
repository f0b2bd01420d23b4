"""A model that computes with other weights for a while, one layer's at a time: what a choice of weights costs, before any layer is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

# The value that a Parameter is to have, in its layout; None: its own.
Value = Callable[[], Tensor | None]


@contextmanager
def substituted(values: Mapping[tuple[nn.Module, str], Value]) -> Iterator[None]:
    """While active, each of the modules runs with ``value()`` in place of its Parameter of that name.

    A value is made when its module is called and dropped afterwards. Parameters are as before when a call ends, by an error too.
    """
    parameters: dict[nn.Module, dict[str, Value]] = {}
    for (module, name), value in values.items():
        parameters.setdefault(module, {})[name] = value
    own: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def put(chosen: dict[str, Value], module: nn.Module, args: tuple) -> None:
        for name, value in chosen.items():
            p = module.get_parameter(name)
            found = value()
            if found is not None:
                own.setdefault(module, []).append((p, p.data))
                p.data = found.to(p.device, p.dtype)

    def back(module: nn.Module, args: tuple, output: object) -> None:
        for p, data in own.pop(module, []):
            p.data = data

    handles = []
    try:
        for module, chosen in parameters.items():
            handles.append(module.register_forward_pre_hook(partial(put, chosen)))
            handles.append(module.register_forward_hook(back, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in list(own):
            back(module, (), None)
