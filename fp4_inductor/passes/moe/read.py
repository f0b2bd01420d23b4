"""Follow an element of a tensor back through views, conversions, gathers and scatters to where it is computed or stored."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .index import ZERO, Const, Position, Unaligned, Unproven, Value, Var

aten, prims = torch.ops.aten, torch.ops.prims
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Read:
    """The element of ``node`` at ``at``; ``rounded`` is the narrowest dtype it has been converted to since, if any."""

    node: Node
    at: Position
    rounded: torch.dtype | None = field(default=None, compare=False)

    @property
    def variables(self) -> frozenset[Var]:
        return ix.variables(self.at)


def shape_of(node: object) -> tuple[sympy.Expr, ...]:
    found = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(found, Tensor):
        raise Unproven(f"{node} is not a tensor")
    return tuple(map(ix.expression, found.shape))


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


class Reader:
    """Steps through one graph.

    Args:
        dtype: what the layer computes in. A value that passes through a coarser one is not followed: it is rounded there.
    """

    def __init__(self, dtype: torch.dtype):
        self.floats = {dtype, *_FLOATS}
        self.stuck: dict[tuple[Node, Position], ix.Split] = {}

    def read(self, node: Node, at: Position, rounded: torch.dtype | None = None) -> Read:
        """``node`` at ``at``, followed as far back as it is only moved. Broadcast dimensions are read at 0."""
        at = self._normal(node, at)
        while True:
            below = self._below(node, at)
            if below is None:
                return Read(node, at, rounded)
            before, after = dtype_of(below[0]), dtype_of(node)
            if after.is_floating_point and after.itemsize < min(before.itemsize, rounded.itemsize if rounded else 8):
                rounded = after
            node, at = below[0], self._normal(*below)

    def replaced(self, index: ix.Index, new: dict[Var, ix.Index]) -> ix.Index:
        """``index`` with variables replaced, values followed again where that has become possible."""
        if isinstance(index, Value) and not ix.is_sort(index.node):
            return self.index(index.node, tuple(self.replaced(i, new) for i in index.at))
        return ix.substitute(index, new)

    def again(self, read: Read, new: dict[Var, ix.Index]) -> Read:
        """``read`` with variables replaced."""
        return self.read(read.node, tuple(self.replaced(i, new) for i in read.at), read.rounded)

    def index(self, node: Node, at: Position) -> ix.Index:
        """The integer that ``node`` holds at ``at``, as an index."""
        found = self.read(node, at)
        node, at = found.node, found.at
        if is_call(node, prims.iota.default) and node.kwargs.get("start", 0) == 0 and node.kwargs.get("step", 1) == 1:
            return at[0]
        if is_call(node, aten.full.default) and isinstance(node.args[1], int):
            return Const(node.args[1])
        if (sort := output_of_sort(node, 1)) is not None:
            of = self.index(sort.args[0], (probe := Var(shape_of(node)[0], ("sorted", sort)),))
            # sorting a permutation gives its inverse
            back = isinstance(of, Value) and ix.is_sort(of.node) and of.at == (probe,)
            return ix.inverse(of.node, at[0]) if back else ix.permuted(sort, at[0])
        if is_call(node, aten.nonzero.default) and isinstance(row := at[0], ix.NonzeroRow) and row.nonzero is node and isinstance(at[1], Const):
            return row.at[at[1].value]
        if isinstance(by := _floor_divisor(node), int):
            return ix.divide(self.index(node.args[0], at), by)  # type: ignore[arg-type]
        return Value(node, at)

    def _normal(self, node: Node, at: Position) -> Position:
        return tuple(ZERO if size == 1 else i for i, size in zip(at, shape_of(node), strict=True))

    def _below(self, node: Node, at: Position) -> tuple[Node, Position] | None:
        if node.op != "call_function":
            return None
        rule = _MOVES.get(node.target)
        try:
            return None if rule is None else rule(self, node, at)
        except ix.Split as need:
            self.stuck[node, at] = need
        except Unaligned:
            pass
        return None


Rule = Callable[[Reader, Node, Position], tuple[Node, Position] | None]
_MOVES: dict[Any, Rule] = {}


def _moves(*ops: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _MOVES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def _source(node: Node) -> Node:
    source = node.args[0]
    if not isinstance(source, Node):
        raise Unproven(f"{node} has no tensor to read from")
    return source


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@_moves(aten.clone.default, aten.alias.default, aten.detach.default)
def _same(reader, node, at):
    return _source(node), at


@_moves(prims.convert_element_type.default, aten._to_copy.default)
def _converted(reader, node, at):
    before, after = dtype_of(_source(node)), dtype_of(node)
    exact = after in (torch.int32, torch.int64) and not before.is_floating_point and before != torch.bool
    return (_source(node), at) if exact or (before in reader.floats and after in reader.floats) else None


@_moves(aten.permute.default)
def _permute(reader, node, at):
    back = list(at)
    for position, dim in enumerate(node.args[1]):
        back[dim % len(at)] = at[position]
    return _source(node), tuple(back)


@_moves(aten.transpose.int)
def _transpose(reader, node, at):
    back = list(at)
    a, b = (d % len(at) for d in node.args[1:3])
    back[a], back[b] = back[b], back[a]
    return _source(node), tuple(back)


@_moves(aten.t.default)
def _t(reader, node, at):
    return _source(node), at[::-1]


@_moves(aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
def _reshape(reader, node, at):
    here, there = shape_of(node), shape_of(_source(node))
    # Dimensions in front that stay as they are need no arithmetic, and keep their variable whatever its size.
    common = 0
    while common < min(len(here), len(there)) and ix.equal(here[common], there[common]):
        common += 1
    flat = ix.join(zip(at[common:], here[common:], strict=True))
    return _source(node), at[:common] + ix.split(flat, ix.product(here[common:]), there[common:])


@_moves(aten.expand.default)
def _expand(reader, node, at):
    return _source(node), at[len(at) - len(shape_of(_source(node))) :]


@_moves(aten.repeat.default)
def _repeat(reader, node, at):
    below = shape_of(_source(node))
    times = node.args[1][len(at) - len(below) :]
    kept = at[len(at) - len(below) :]
    if not all(isinstance(t, int) for t in times):
        return None
    return _source(node), tuple(i if t == 1 else ix.split(i, size * t, (ix.expression(t), size))[1] for i, t, size in zip(kept, times, below, strict=True))


@_moves(aten.slice.Tensor)
def _slice(reader, node, at):
    dim, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    dim %= len(at)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    if start < 0:
        size = shape_of(_source(node))[dim]
        if not size.is_Integer:
            return None
        start = max(start + int(size), 0)
    return _source(node), (*at[:dim], ix.shift(at[dim], step, start), *at[dim + 1 :])


@_moves(aten.select.int)
def _select(reader, node, at):
    source = _source(node)
    dim, number = node.args[1] % len(shape_of(source)), node.args[2]
    if not isinstance(number, int):
        return None
    if number < 0:
        size = shape_of(source)[dim]
        if not size.is_Integer:
            return None
        number += int(size)
    return source, (*at[:dim], Const(number), *at[dim:])


@_moves(operator.getitem)
def _part_of(reader, node, at):
    """``split(x, ..)[i]`` and the values of a sort."""
    many, number = node.args
    sort = output_of_sort(node, 0)
    if sort is not None:
        return sort.args[0], (ix.permuted(sort, at[0]),)
    if not isinstance(many, Node) or many.op != "call_function":
        return None
    if many.target is aten.unbind.int:
        dim = argument(many, 1, "dim", 0) % (len(at) + 1)
        return _source(many), (*at[:dim], Const(number), *at[dim:])
    if many.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    sizes, dim = many.args[1], argument(many, 2, "dim", 0) % len(at)
    start = number * sizes if isinstance(sizes, int) else sum(sizes[:number]) if isinstance(sizes, (list, tuple)) else None
    return None if not isinstance(start, int) else (_source(many), (*at[:dim], ix.shift(at[dim], 1, start), *at[dim + 1 :]))


def output_of_sort(node: Node, which: int) -> Node | None:
    """The ascending sort of a vector whose output ``which`` this node is."""
    if node.op != "call_function" or node.target is not operator.getitem or node.args[1] != which:
        return None
    sort = node.args[0]
    if not isinstance(sort, Node) or not ix.is_sort(sort) or len(shape_of(sort.args[0])) != 1:
        return None
    position = 2 if sort.target is aten.sort.default else 3
    return None if sort.kwargs.get("descending", False) or (len(sort.args) > position and sort.args[position]) else sort


@_moves(aten.index.Tensor)
def _gather(reader, node, at):
    """``x[:, i, j]``: one or more index tensors next to each other."""
    source, indices = _source(node), node.args[1]
    given = [d for d, i in enumerate(indices) if i is not None]
    if not given or given != list(range(given[0], given[-1] + 1)) or not all(isinstance(indices[d], Node) for d in given):
        return None
    nodes = [indices[d] for d in given]
    if any(dtype_of(n) in (torch.bool, torch.uint8) for n in nodes):
        return None
    rank = max(len(shape_of(n)) for n in nodes)
    first = given[0]
    inner = at[first : first + rank]
    taken = tuple(reader.index(n, inner[rank - len(shape_of(n)) :]) for n in nodes)
    return source, at[:first] + taken + at[first + rank :]


@_moves(aten.index_select.default)
def _index_select(reader, node, at):
    dim = node.args[1] % len(at)
    return _source(node), (*at[:dim], reader.index(node.args[2], (at[dim],)), *at[dim + 1 :])


@_moves(aten.embedding.default)
def _embedding(reader, node, at):
    return _source(node), (reader.index(node.args[1], at[:-1]), at[-1])


@_moves(aten.gather.default)
def _gather_along(reader, node, at):
    """``torch.gather``: the other dimensions are read where the index tensor is."""
    dim = node.args[1] % len(at)
    return _source(node), (*at[:dim], reader.index(node.args[2], at), *at[dim + 1 :])


@_moves(aten.index_put.default)
def _unsorted(reader, node, at):
    """``out[permutation] = values``: every row is written once, so what was there before does not matter."""
    base, indices, values = node.args[:3]
    if argument(node, 3, "accumulate", False) or len(indices) != 1 or indices[0] is None or len(shape_of(indices[0])) != 1:
        return None
    return _written(reader, base, indices[0], values, at)


@_moves(aten.scatter.src)
def _scattered(reader, node, at):
    base, dim, indices, values = node.args[:4]
    return _written(reader, base, indices, values, at) if len(at) == 1 and dim in (0, -1) else None


def _written(reader: Reader, base: Node, indices: Node, values: Node, at: Position) -> tuple[Node, Position] | None:
    rows = shape_of(indices)[0]
    probe = Var(rows, ("written", indices))
    to = reader.index(indices, (probe,))
    if not isinstance(to, Value) or not ix.is_sort(to.node) or to.at != (probe,) or not ix.equal(rows, shape_of(base)[0]):
        return None
    below = (ix.inverse(to.node, at[0]), *at[1:])
    return values, below[len(below) - len(shape_of(values)) :]


def _floor_divisor(node: Node) -> object:
    if is_call(node, aten.div.Tensor_mode) and node.kwargs.get("rounding_mode") in ("floor", "trunc"):
        return node.args[1]
    return node.args[1] if is_call(node, aten.floor_divide.default) else None
