"""A decoder as a chain of blocks: calibration data goes through it block by block, so that only one block's statistics are in memory.

Found by observation, not by family: the list of modules that holds most of the weights, each fed with what the one before it returned.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from .forwards import replaced_forwards
from .plan import ExpertsTarget, Target, weight_count


class BlockCall(NamedTuple):
    """What a block was called with for one batch, its hidden state left out."""

    args: tuple
    kwargs: dict[str, Any]


@dataclass
class Block:
    """One block of a chain. ``calls``: one per batch."""

    name: str
    module: nn.Module
    calls: list[BlockCall] = field(default_factory=list)

    def __call__(self, hidden: Tensor, batch: int) -> Tensor:
        """The block's hidden state for the recorded call of ``batch``, with ``hidden`` in place of what it got then."""
        return self.run(self.module, hidden, batch)

    def run(self, module: nn.Module, hidden: Tensor, batch: int) -> Tensor:
        """As a call, with ``module`` (a copy of this block's) in its place."""
        call = self.calls[batch]
        return _hidden(module(hidden, *call.args, **call.kwargs))


@dataclass
class Chain:
    """Blocks that feed each other. ``hidden``: the first block's input, one per batch. ``broken``: why this is no chain."""

    blocks: list[Block]
    hidden: list[Tensor] = field(default_factory=list)
    broken: str | None = None

    def block_of(self, name: str) -> int | None:
        """Index of the block that holds the module ``name``."""
        return next((i for i, b in enumerate(self.blocks) if name.startswith(f"{b.name}.")), None)


def find_chain(model: nn.Module, targets: Sequence[Target | ExpertsTarget]) -> Chain:
    """The ``ModuleList`` or ``Sequential`` whose children hold most of the targets' weights; ``broken`` if there is none."""
    weights: dict[str, dict[str, int]] = defaultdict(dict)
    containers = {name for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    for t in targets:
        parts = t.name.split(".")
        for prefix in itertools.accumulate(parts[:-1], lambda a, b: f"{a}.{b}"):
            parent, _, child = prefix.rpartition(".")
            if parent in containers:
                weights[parent][child] = weights[parent].get(child, 0) + weight_count(t)
    if not weights:
        return Chain([], broken="no list of blocks holds the layers")
    # The outermost of equals: a block may hold a list of its own.
    best = max(sorted(weights, key=len), key=lambda name: sum(weights[name].values()))
    children = dict(model.get_submodule(best).named_children())
    return Chain([Block(f"{best}.{child}", module) for child, module in children.items()])


@contextmanager
def recording(chain: Chain) -> Iterator[None]:
    """While active, forward passes of the model fill ``chain.hidden`` and the blocks' ``calls``, and prove or break the chain."""
    handles = []
    last: list[Any] = [None]
    expected = [0]

    def before(index: int) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if chain.broken:
                return
            hidden, rest, named = (args[0], args[1:], dict(kwargs)) if args else (None, (), dict(kwargs))
            if index != expected[0] or not isinstance(hidden, Tensor) or (index and hidden is not last[0]):
                chain.broken = f"{chain.blocks[index].name} is not fed with what the block before it returned"
                return
            if index == 0:
                chain.hidden.append(hidden.detach().clone())
            chain.blocks[index].calls.append(BlockCall(tuple(without_cache(a) for a in rest), {k: without_cache(v) for k, v in named.items()}))

        return hook

    def after(index: int) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            last[0] = _hidden(output)
            expected[0] = (index + 1) % len(chain.blocks)

        return hook

    try:
        if not chain.broken:
            for i, block in enumerate(chain.blocks):
                handles.append(block.module.register_forward_pre_hook(before(i), with_kwargs=True))
                handles.append(block.module.register_forward_hook(after(i)))
        yield
        if not chain.broken and any(len(b.calls) != len(chain.hidden) for b in chain.blocks):
            chain.broken = "not every block ran once for every batch"
    finally:
        for handle in handles:
            handle.remove()
        if chain.broken:
            chain.hidden.clear()
            for block in chain.blocks:
                block.calls.clear()


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) else output


def without_cache(value: Any) -> Any:
    """None for a key/value cache: the recorded call runs more than once, and a cache would grow each time."""
    return None if hasattr(value, "get_seq_length") else value


def stages(block: Block, targets: Sequence[Target | ExpertsTarget], hidden: Tensor) -> tuple[list[list[Target | ExpertsTarget]], bool]:
    """The block's targets in execution order, those that read one and the same tensor together, those not reached last; and
    whether each of them runs exactly once."""
    order: list[tuple[Target | ExpertsTarget, Any]] = []
    handles = [t.module.register_forward_pre_hook(_note(order, t), with_kwargs=True) for t in targets]
    try:
        block(hidden, 0)
    finally:
        for handle in handles:
            handle.remove()
    out: list[list[Target | ExpertsTarget]] = []
    current: Any = None
    seen: set[str] = set()
    for t, x in order:
        if t.name not in seen:
            seen.add(t.name)
            if out and current is x:
                out[-1].append(t)
            else:
                out.append([t])
            current = x
    rest = [t for t in targets if t.name not in seen]
    return [*out, *([rest] if rest else [])], len(order) == len(targets)


@contextmanager
def skipping(chain: Chain, index: int, hidden: Tensor) -> Iterator[None]:
    """While active, the blocks before ``index`` do nothing and block ``index`` is fed with ``hidden``."""
    with replaced_forwards() as replace:
        for block in chain.blocks[:index]:
            replace(block.module, lambda *args, **kwargs: hidden)
        yield


def _note(order: list[tuple[Target | ExpertsTarget, Any]], target: Target | ExpertsTarget) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        order.append((target, input_of(args, kwargs)))

    return hook


def input_of(args: tuple, kwargs: dict) -> Any:
    """The activation of a linear layer's call."""
    return args[0] if args else next(iter(kwargs.values()), None)
