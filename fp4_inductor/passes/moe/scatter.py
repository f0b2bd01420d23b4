"""Scattered router weights, and rows added up token by token, as sums of products."""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .index import Const, Index, Position, Var
from .read import argument, aten, shape_of
from .sums import Delta, Sums, Term, condition_factor, expands, filled, operand


@expands(aten.scatter_add.default, aten.scatter.src)
def _scatter(sums, node, at):
    """``zeros.scatter(dim, ids, w)``; the plain one only where no two ids of a row can be the same."""
    base, dim, ids, values = node.args[:4]
    dim %= len(at)
    if filled(base) != 0.0 or (node.target is aten.scatter.src and not _distinct(ids, dim)):
        return None
    if any(not ix.equal(a, b) for d, (a, b) in enumerate(zip(shape_of(ids), shape_of(node), strict=True)) if d != dim):
        return None
    j, bound = sums.variable(shape_of(ids)[dim], "slot", node)
    there = (*at[:dim], j, *at[dim + 1 :])
    return Term([Delta(sums.index(ids, there), at[dim]), sums.read(values, there)], list(bound))


def _distinct(ids: Node, dim: int) -> bool:
    """Indices along ``dim`` as top-k and sort return them."""
    many = ids.args[0] if ids.op == "call_function" and ids.args else None
    if not isinstance(many, Node) or ids.args[1:] != (1,):
        return False
    rank, op = len(shape_of(ids)), cast("Any", many.target)
    along = {aten.topk.default: argument(many, 2, "dim", -1), aten.sort.default: argument(many, 1, "dim", -1)}.get(op)
    return along is not None and along % rank == dim


@expands(aten.index_put.default)
def _index_put(sums, node, at):
    return added_rows(sums, node, at) if filled(node.args[0]) == 0.0 else None


@expands(aten.index_add.default)
def _index_add(sums, node, at):
    return added_rows(sums, node, at) if filled(node.args[0]) == 0.0 else None


def added_rows(sums: Sums, node: Node, at: Position) -> Term | None:
    """What ``base.index_add(0, token of each row, rows)`` adds to ``base``.

    Every token has the same number of rows, or the rows are those that ``nonzero`` lists.
    """
    if is_call(node, aten.index_put.default):
        base, among, values = node.args[:3]
        indices = among[0] if len(among) == 1 and argument(node, 3, "accumulate", False) else None
    elif is_call(node, aten.index_add.default):
        base, dim, indices, values = node.args[:4]
        indices = indices if dim == 0 and node.kwargs.get("alpha", 1) == 1 else None
    else:
        return None
    if indices is None or len(shape_of(indices)) != 1 or len(shape_of(values)) != len(at):
        return None
    return _listed_rows(sums, node, indices, values, at) or _all_rows(sums, node, base, indices, values, at)


def _listed_rows(sums: Sums, node: Node, indices: Node, values: Node, at: Position) -> Term | None:
    probe = Var(shape_of(indices)[0], ("row of", node))
    to = sums.index(indices, (probe,))
    if not isinstance(to, ix.Value) or not is_call(to.node, aten.nonzero.default) or to.at[0] is not probe or not isinstance(to.at[1], Const):
        return None
    listed, where, bound = to.node.args[0], [], []
    for d, size in enumerate(shape_of(listed)):
        index, new = (at[0], []) if d == to.at[1].value else sums.variable(size, "slot", node, d)
        where.append(index)
        bound += new
    entry = condition_factor(sums, operand(sums, listed, tuple(where)), True)
    return Term([entry, sums.read(values, (ix.NonzeroRow(to.node, tuple(where)), *at[1:]))], bound)


def _all_rows(sums: Sums, node: Node, base: Node, indices: Node, values: Node, at: Position) -> Term | None:
    rows, tokens = shape_of(indices)[0], shape_of(base)[0]
    slots = ix.quotient(rows, tokens)
    if slots is None:
        return None
    probe = Var(rows, ("row of", node))
    to = sums.index(indices, (probe,))
    j, bound = sums.variable(slots, "slot", node)
    pair = ix.join(((at[0], tokens), (j, slots)))
    if sums.index(indices, (pair,)) == at[0]:
        return Term([sums.read(values, (pair, *at[1:]))], list(bound))
    row: Index = pair
    if isinstance(to, ix.Div) and isinstance(to.index, ix.Value) and ix.is_sort(to.index.node) and to.index.at == (probe,):
        row = ix.inverse(to.index.node, pair)  # rows sorted by expert
    if ix.substitute(to, {probe: row}) != at[0]:
        return None
    return Term([sums.read(values, (row, *at[1:]))], list(bound))
