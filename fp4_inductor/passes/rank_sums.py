"""Sums over the ranks of a divided model: ``residual + wait_tensor(all_reduce(part))``, and whether a launch of products computes them (:mod:`.chain`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .. import _exchange
from .._torch.collectives import functional_calls
from . import views
from .layout import below_views, is_call, value

aten = torch.ops.aten


class RankSum(NamedTuple):
    """``path``: from the first node behind the part to the sum, which the last one gives. ``residual``: what it adds to that of the parts."""

    path: tuple[Node, ...]
    residual: Node | None
    group: str

    @property
    def result(self) -> Node:
        return self.path[-1]


def read(part: Node) -> RankSum | None:
    """The sum over ranks that alone reads ``part``, and what is added to it, if that is as wide; None: there is none."""
    reduce, wait = functional_calls()
    path = _along(part, views.RESHAPES)
    sums = _along(path[-1], {reduce})[1:2]
    waits = _along(sums[0], {wait})[1:] if sums else []
    if not waits or sums[0].args[1] != "sum":
        return None
    path = [*path[1:], *sums, *waits]
    group: Any = sums[0].args[2]
    shaped = _along(path[-1], views.RESHAPES)
    added = _along(shaped[-1], {aten.add.Tensor})[1:2]
    if added and not added[0].kwargs:
        other = next((node for node in added[0].args if node is not shaped[-1]), None)
        if isinstance(other, Node) and all(_alike(node, added[0]) for node in (other, shaped[-1])):
            return RankSum((*path, *shaped[1:], added[0]), other, group)
    return RankSum(tuple(path), None, group)


def why_not(sum: RankSum) -> str:
    """Why no launch computes ``sum``; empty: one can."""
    wide = value(sum.result).shape[-1] > _exchange.ROW
    return _exchange.why_not(sum.group) or (f"it has more than {_exchange.ROW} columns" if wide else "")


def in_a_launch(x: Node) -> bool:
    """Is ``x`` a sum over ranks, or one and a residual, that a launch can compute?"""
    reduce, wait = functional_calls()
    for operand in x.args if is_call(x, aten.add.Tensor) else (x,):
        node = below_views(operand) if isinstance(operand, Node) else operand
        if is_call(node, wait) and is_call(node.args[0], reduce) and not _exchange.why_not(node.args[0].args[2]):  # type: ignore[union-attr,arg-type]
            return value(x).shape[-1] <= _exchange.ROW
    return False


def _alike(a: Node, b: Node) -> bool:
    return value(a).shape == value(b).shape and value(a).dtype == value(b).dtype


def _along(node: Node, targets: set[Any]) -> list[Node]:
    """``node``, and those of ``targets`` behind it, as long as nothing else reads the one before."""
    path = [node]
    while len(path[-1].users) == 1 and next(iter(path[-1].users)).target in targets:
        path.append(next(iter(path[-1].users)))
    return path
