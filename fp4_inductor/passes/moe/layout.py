"""Bring a tensor of the graph into the shape an op takes, when each of its elements is known by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from ..emit import emit
from . import index as ix
from .index import Const, Index, Shift, Unproven, Var
from .read import Read, aten, shape_of

Groups = Sequence[Sequence[Var]]


@dataclass(frozen=True)
class Layout:
    """How ``read.node`` becomes a tensor with one dimension per group of variables; made by :func:`plan`, written by :func:`write`.

    Args:
        digits: the dimensions of the node, taken apart: (index, size) each.
        found: the variables among them, in that order.
    """

    read: Read
    digits: tuple[tuple[Index, sympy.Expr], ...]
    found: tuple[Var, ...]
    groups: tuple[tuple[Var, ...], ...]


def plan(read: Read, groups: Groups, what: str) -> Layout:
    """A layout of ``read`` over ``groups``; variables it does not depend on are broadcast.

    Raises:
        Unproven: its elements do not lie as a permutation of those variables.
    """
    digits = [d for index, size in zip(read.at, shape_of(read.node), strict=True) for d in ix.digits(index, size)]
    found = [d.index if isinstance(d, Shift) else d for d, _ in digits if not isinstance(d, Const)]
    wanted = [v for group in groups for v in group]
    known = all(isinstance(v, Var) for v in found) and len(set(found)) == len(found) and set(found) <= set(wanted)
    whole = all(ix.equal(d.size, size) if isinstance(d, Var) else _static(d) for d, size in digits)
    if not known or not whole:
        raise Unproven(f"{what} is not a plain tensor over tokens and slots", 3)
    if any(not v.size.is_Integer for v in wanted if v not in found):
        raise Unproven(f"{what} is broadcast over a dimension of unknown size", 3)
    return Layout(read, tuple(digits), tuple(found), tuple(map(tuple, groups)))  # type: ignore[arg-type]


def _static(index: Index) -> bool:
    return isinstance(index, Const) or (isinstance(index, Shift) and index.step > 0 and isinstance(index.index, Var) and index.index.size.is_Integer)


def write(layout: Layout) -> Node:
    """Emit the views; the node is returned as it is where none is needed."""
    node, graph = layout.read.node, layout.read.node.graph
    shape = [ix.product(v.size for v in group) for group in layout.groups]
    order = [v for group in layout.groups for v in group]
    known = [v for v in order if v in layout.found]
    if list(layout.found) == known == order and len(layout.digits) == len(order) and all(isinstance(d, Var) for d, _ in layout.digits):
        return reshape(node, shape)
    node = reshape(node, [size for _, size in layout.digits])
    for dim, (digit, _) in reversed(list(enumerate(layout.digits))):
        if isinstance(digit, Const):
            node = emit(graph, aten.select.int, (node, dim, digit.value))
        elif isinstance(digit, Shift):
            last = digit.start + digit.step * (int(digit.index.size) - 1)  # type: ignore[union-attr]
            node = emit(graph, aten.slice.Tensor, (node, dim, digit.start, last + 1, digit.step))
    if list(layout.found) != known:
        node = emit(graph, aten.permute.default, (node, [layout.found.index(v) for v in known]))
    for position, v in enumerate(order):
        if v not in layout.found:
            node = emit(graph, aten.unsqueeze.default, (node, position))
    if known != order:
        node = emit(graph, aten.expand.default, (node, [-1 if v in layout.found else int(v.size) for v in order]))
    return reshape(node, shape)


def reshape(node: Node, shape: Sequence[sympy.Expr], like: Node | None = None) -> Node:
    """``node`` in ``shape``; sizes that are not known come from ``like``, which has that shape."""
    here = shape_of(node)
    if len(here) == len(shape) and all(map(ix.equal, here, shape)):
        return node
    graph: Graph = node.graph
    unknown = [d for d, size in enumerate(shape) if not size.is_Integer]
    sizes: list[int | Node] = [-1 if d in unknown else int(size) for d, size in enumerate(shape)]
    for d in unknown[1:]:
        sizes[d] = _size(graph, shape[d], like, d)
    return emit(graph, aten.reshape.default, (node, sizes))


def _size(graph: Graph, size: sympy.Expr, like: Node | None, dim: int) -> Node:
    """A node whose value is ``size``: one of the graph's, or read off ``like``."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and ix.equal(value.node.expr, size):
            return node
    if like is None:
        raise Unproven("a dimension whose size the graph does not hold", 3)
    node = graph.call_function(aten.sym_size.int, (like, dim))
    node.meta["val"] = like.meta["val"].shape[dim]
    return node
