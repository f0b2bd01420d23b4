"""The blocks of models in training, compiled: a block in plain operators is 40 launches each way, most of them over a few megabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from .._torch.compiling import Compiled
from ..decoding.regions import plain_forward
from .forwards import replaced_forwards


@contextmanager
def compiled_blocks(models: Sequence[nn.Module], names: Sequence[str]) -> Iterator[Callable[[], str]]:
    """While active, the modules ``names`` of each of ``models`` run compiled, those of one class by one function. What cannot be compiled runs as it is.

    Gives a function that says why something is not compiled; empty: all is.
    """
    made: dict[tuple[int, Callable], Compiled] = {}
    said: set[str] = set()
    with replaced_forwards() as replace:
        for i, model in enumerate(models):
            modules = dict(model.named_modules())
            for name in names:
                module = modules.get(name)
                function = None if module is None else plain_forward(module)
                if module is None or function is None:
                    said.add(f"blocks of {type(model).__name__} are not compiled: " + (f"there is no {name}" if module is None else "their forward is wrapped"))
                    continue
                compiled = made.setdefault((i, function), Compiled(function, True, f"{type(module).__name__}.forward"))
                replace(module, partial(compiled, module))
        yield lambda: "; ".join(sorted(said | {c.note for c in made.values() if c.note}))
