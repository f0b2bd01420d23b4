"""Weights one after the other, each with the second moments of its inputs, in bounded memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from .calibrate import evaluating, feed
from .chain import Block, Chain, stages
from .convert import dense_weight
from .hessian import Moments, Watch, Weigh
from .plan import ExpertsTarget, Target
from .progress import bar
from .routed import RoutedInputs

Group: TypeAlias = list[Target]
Item: TypeAlias = Group | ExpertsTarget
_BYTES = 2 << 30  # of Hessians in memory at once, outside a chain of blocks


def walk(
    model: nn.Module,
    chain: Chain,
    items: Sequence[Item],
    batches: list[Any],
    *,
    sequential: bool,
    progress: bool,
    desc: str,
    weigh: Weigh | None = None,
) -> Iterator[tuple[str, Item, Moments | RoutedInputs]]:
    """Yield ``(place, group, moments of its inputs)`` for every group, of experts their inputs; in a chain block by block, in execution order.

    Args:
        chain: recorded on ``batches``; if broken, whole-model passes take its place.
        sequential: the caller changes each group's weights, in the modules that are there, before it asks for the next: later layers
            are measured on what the changed ones feed them, and ``moments`` also know what the dense model fed them. The
            modules of a block may be replaced once the next place is met. False: everything is measured on the dense model.
        weigh: see :class:`.hessian.Watch`.
    """
    inside: dict[int, list[Item]] = {}
    outside: list[Item] = []
    for item in items:
        alone = isinstance(item, ExpertsTarget) or len(item) == 1
        index = chain.block_of(targets_of(item)[0].name) if alone and not chain.broken else None
        if index is None:
            outside.append(item)
        else:
            inside.setdefault(index, []).append(item)
    if inside:
        yield from _through(model, chain, inside, sequential, progress, desc, weigh)
    for i, part in enumerate(_parts(outside)):
        watch = Watch([t for item in part for t in targets_of(item)], weigh=weigh)
        try:
            with evaluating(model):
                for _ in feed(model, batches, progress, desc):
                    watch.add()
        finally:
            watch.close()
        for item in part:
            yield f"outside {i}", item, watch.routed[item.name] if isinstance(item, ExpertsTarget) else _sum([watch.moments[t.name] for t in item])


def targets_of(item: Item) -> Sequence[Target | ExpertsTarget]:
    """The modules of a group, or the one of experts."""
    return [item] if isinstance(item, ExpertsTarget) else item


def _through(
    model: nn.Module, chain: Chain, inside: dict[int, list[Item]], sequential: bool, progress: bool, desc: str, weigh: Weigh | None
) -> Iterator[tuple[str, Item, Moments | RoutedInputs]]:
    hidden, dense = list(chain.hidden), list(chain.hidden)
    last = max(inside)
    for index, block in enumerate(bar(chain.blocks, desc, "block", progress)):
        if index > last:
            break
        mine = {targets_of(item)[0].name: item for item in inside.get(index, [])}
        # Until the first weight is changed both streams are one.
        twin = copy.deepcopy(block.module) if sequential and (mine or dense[0] is not hidden[0]) else None
        targets = [targets_of(item)[0] for item in mine.values()]
        with evaluating(model):
            order, once = stages(block, targets, hidden[0]) if sequential and targets else ([targets] if targets else [], False)
        done = False
        for stage in order:
            watch, outputs = _measure(model, block, twin, stage, hidden, dense, once, weigh)
            if not sequential:  # one stage, and the block's own outputs are what the next is fed with
                hidden, done = outputs, True
            for t in stage:
                yield block.name, mine[t.name], watch.found(t.name)
        if done:
            dense = list(hidden)
            continue
        with evaluating(model):
            for b in range(len(hidden)):
                before = dense[b] if twin is None else block.run(twin, dense[b], b)
                hidden[b] = block(hidden[b], b)
                dense[b] = hidden[b] if twin is None else before


def _measure(
    model: nn.Module, block: Block, twin: nn.Module | None, stage: list[Target | ExpertsTarget], hidden: list, dense: list, once: bool, weigh: Weigh | None
) -> tuple[Watch, list]:
    """``(what the layers of one stage were fed with, what the block returned for each batch)``; None for a run that ended early."""
    prefix = len(block.name) + 1
    watch = Watch(stage, None if twin is None else lambda t: twin.get_submodule(t.name[prefix:]), stop=once, weigh=weigh)
    outputs = []
    try:
        with evaluating(model):
            for b in range(len(hidden)):
                if twin is not None:
                    watch.run(block.run, twin, dense[b], b)
                outputs.append(watch.run(block, hidden[b], b))
                watch.add()
    finally:
        watch.close()
    return watch, outputs


def _parts(items: list[Item]) -> Iterator[list[Item]]:
    """Groups whose Hessians fit in memory together; the tokens of a module of experts by themselves."""
    part: list[Item] = []
    size = 0
    for group in items:
        if isinstance(group, ExpertsTarget):
            yield [group]
            continue
        k = dense_weight(group[0]).shape[1]
        need = 4 * len(group) * k * k
        if part and size + need > _BYTES:
            yield part
            part, size = [], 0
        part.append(group)
        size += need
    if part:
        yield part


def _sum(moments: list[Moments]) -> Moments:
    """Layers that share a weight see different inputs: it is judged by all of them."""
    seen = [m.hessian for m in moments if m.hessian is not None]
    total = torch.stack([h.to(seen[0].device) for h in seen]).sum(0) if seen else None
    return Moments(total, None if len(moments) > 1 else moments[0].cross, sum(m.rows for m in moments))
