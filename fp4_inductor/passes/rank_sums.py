"""Sums over the ranks of a divided model, and whether a launch of products computes them (:mod:`.chain`). They have two spellings:

residual + wait_tensor(all_reduce(part, "sum", group))      torch's functional collectives
residual + sum(part, group)                                 one operator of another library (:mod:`.operators`), vLLM's for example
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .. import _exchange
from .._torch.collectives import functional_calls
from . import views
from .layout import below_views, is_call, rows_of, value
from .operators import SUMS, name_of

aten = torch.ops.aten


class RankSum(NamedTuple):
    """``path``: from the first node behind the part to the sum, which the last one gives. ``residual``: what it adds to that of the parts. ``group``: torch's
    name of it."""

    path: tuple[Node, ...]
    residual: Node | None
    group: str

    @property
    def result(self) -> Node:
        return self.path[-1]


def read(part: Node) -> RankSum | None:
    """The sum over ranks that alone reads ``part``, and what is added to it, if that is as wide; None: there is none."""
    path = _along(part, views.RESHAPES)
    behind = _reader(path[-1])
    if is_call(behind, functional_calls()[0]):
        behind = _reader(behind)  # type: ignore[arg-type]
    called = _call(behind)
    if called is None:
        return None
    path = [*path[1:], *called.nodes]
    shaped = _along(path[-1], views.RESHAPES)
    added = _reader(shaped[-1])
    if is_call(added, aten.add.Tensor) and not added.kwargs:  # type: ignore[union-attr]
        other = next((node for node in added.args if node is not shaped[-1]), None)  # type: ignore[union-attr]
        if isinstance(other, Node) and all(_alike(node, added) for node in (other, shaped[-1])):  # type: ignore[arg-type]
            return RankSum((*path, *shaped[1:], added), other, called.group)  # type: ignore[arg-type]
    return RankSum(tuple(path), None, called.group)


def why_not(sum: RankSum) -> str:
    """Why no launch computes ``sum``; empty: one can."""
    wide = value(sum.result).shape[-1] > _exchange.ROW
    return _exchange.why_not(sum.group) or (f"it has more than {_exchange.ROW} columns" if wide else "")


def in_a_launch(x: Node) -> bool:
    """Is ``x`` a sum over ranks, or one and a residual, that a launch can compute? It takes one row."""
    rows = rows_of(x)
    if type(rows) is not int or rows != 1:
        return False
    for operand in x.args if is_call(x, aten.add.Tensor) else (x,):
        called = _call(below_views(operand)) if isinstance(operand, Node) else None
        found = None if called is None else read(called.part)
        if found is not None and found.result in (x, below_views(x)):
            return not why_not(found)
    return False


class _Call(NamedTuple):
    """``nodes``: the operators that sum ``part``."""

    nodes: tuple[Node, ...]
    part: Node
    group: str


def _call(node: Any) -> _Call | None:
    """``node`` as a sum over ranks alone."""
    reduce, wait = functional_calls()
    if is_call(node, wait) and is_call(node.args[0], reduce):
        part, kind, group = node.args[0].args
        return _Call((node.args[0], node), part, group) if kind == "sum" else None
    named = SUMS.get(name_of(node.target)) if isinstance(node, Node) else None
    if named is None or len(node.args) != 2 or node.kwargs:
        return None
    part, name = node.args
    group = named(name)
    return _Call((node,), part, group) if group else None


def _alike(a: Node, b: Node) -> bool:
    return value(a).shape == value(b).shape and value(a).dtype == value(b).dtype


def _reader(node: Node) -> Node | None:
    """What alone reads ``node``."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _along(node: Node, targets: set[Any]) -> list[Node]:
    """``node``, and those of ``targets`` behind it, as long as nothing else reads the one before."""
    path = [node]
    while (reader := _reader(path[-1])) is not None and reader.target in targets:
        path.append(reader)
    return path
