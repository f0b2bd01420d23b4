"""An element of a tensor as a sum of products: ``sum over bound variables of factor * factor * ..``.

Matrix products of every spelling (mm, bmm, grouped, einsum's, multiply and sum), routing masks, one-hot matrices and
scattered additions all become that one form, in which an MoE layer has one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .grouped import GROUPED, expert_of_row
from .index import Const, Index, Position, Refused, Var
from .read import Read, Reader, argument, aten, dtype_of, prims, shape_of

fp4 = torch.ops.fp4
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default, fp4.linear.default, fp4.bmm.default}


@dataclass(frozen=True)
class Weight:
    """Entry ``(n, k)`` of expert ``expert`` of an NVFP4 weight; the nodes are the whole ``[E, ..]`` parts."""

    qdata: Node
    scale: Node
    global_scale: Node
    expert: Index
    n: Index
    k: Index

    @property
    def parts(self) -> tuple[Node, Node, Node]:
        return self.qdata, self.scale, self.global_scale

    @property
    def variables(self) -> frozenset[Var]:
        return ix.variables((self.expert, self.n, self.k))


@dataclass(frozen=True)
class Sum2:
    """``product + bias``; either may be the first operand of an addition."""

    product: Term
    bias: Read
    variables: frozenset[Var]


@dataclass(frozen=True)
class Delta:
    """1 where the two are the same number, else 0."""

    left: Index
    right: Index

    @property
    def variables(self) -> frozenset[Var]:
        return ix.variables((self.left, self.right))


@dataclass(frozen=True)
class Mask:
    """1 where the boolean ``condition`` is ``keeps``, else 0, whatever it multiplies (NaN included)."""

    condition: Read
    keeps: bool

    @property
    def variables(self) -> frozenset[Var]:
        return self.condition.variables


Factor: TypeAlias = Weight | Sum2 | Delta | Mask | Read


@dataclass
class Term:
    """``constant * sum over bound of the product of factors``; ``matmuls``: the nodes that multiply by a weight."""

    factors: list[Factor]
    bound: list[Var] = field(default_factory=list)
    constant: float = 1.0
    matmuls: list[Node] = field(default_factory=list)


class Sums(Reader):
    """Reads elements as sums of products.

    Args:
        splits: which variables to replace by several, from an earlier attempt that raised :class:`~.index.Split`.
    """

    def __init__(self, dtype: torch.dtype, splits: dict[tuple, tuple]):
        super().__init__(dtype)
        self.splits = splits
        self._variables: dict[tuple, list[Var]] = {}

    def variable(self, size: Any, *origin: object) -> tuple[Index, list[Var]]:
        """The variable of ``origin`` over ``range(size)``, or several where one does not do."""
        if origin not in self._variables:
            sizes = self.splits.get((*origin, 0), (size,))
            self._variables[origin] = [Var(s, (*origin, i)) for i, s in enumerate(sizes) if s != 1]
        new = self._variables[origin]
        return ix.join((v, v.size) for v in new), new

    def term(self, start: Term, wanted: Callable[[Factor], bool]) -> Term:
        """``start`` expanded for as long as a factor is ``wanted`` and not a weight."""
        total = Term(list(start.factors), list(start.bound), start.constant, list(start.matmuls))
        todo = 0
        while todo < len(total.factors):
            factor = total.factors[todo]
            if not isinstance(factor, Read) or not wanted(factor):
                todo += 1
                continue
            found = self.expanded(factor)
            if found is None:
                if (factor.node, factor.at) in self.stuck:
                    raise self.stuck[factor.node, factor.at]
                raise Refused(f"{factor.node.target if factor.node.op == 'call_function' else factor.node} is no sum of products")
            total.factors[todo : todo + 1] = found.factors
            if any(v in total.bound for v in found.bound):
                raise Refused("a sum that is multiplied by itself")
            total.bound += found.bound
            total.constant *= found.constant
            total.matmuls += found.matmuls
            if len(total.factors) > 64:
                raise Refused("too many factors")
        return total

    def expanded(self, read: Read) -> Term | None:
        """One step: what ``read.node`` computes from its inputs; None if that is no sum of products."""
        node = read.node
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None and node.op == "call_function" and str(node.target) in GROUPED:
            rule = _grouped
        return None if rule is None else rule(self, node, read.at)

    def weight(self, parts: tuple[Node, Node, Node], lead: Position, n: Index, k: Index) -> Weight:
        """The entry of dequantised ``parts`` at ``(*lead, n, k)``, followed to the weight of all experts."""
        qdata, scale, global_scale = parts
        row = Var(shape_of(qdata)[-2], ("row",))
        codes, scales = (self._whole(part, lead, row) for part in (qdata, scale))
        factor = self.read(global_scale, lead)
        of_factor = ix.join(zip(factor.at, shape_of(factor.node), strict=True))
        if len(shape_of(codes.node)) != 3:
            raise Refused("a weight that is not one matrix per expert")
        if codes.at[:2] != scales.at[:2] or codes.at[0] != of_factor:
            raise Refused("codes, scales and global scales are taken from different experts or rows")
        return Weight(codes.node, scales.node, factor.node, codes.at[0], ix.substitute(codes.at[1], {row: n}), k)

    def _whole(self, part: Node, lead: Position, row: Var) -> Read:
        column = Var(shape_of(part)[-1], ("column",))
        found = self.read(part, (*lead, row, column))
        if found.at[-1] is not column and shape_of(part)[-1] != 1:
            raise Refused("a weight whose columns are rearranged")
        return found


Rule = Callable[[Sums, Node, Position], "Term | None"]
_RULES: dict[Any, Rule] = {}


def _expands(*ops: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def operand(sums: Sums, node: Node, at: Position) -> Read:
    """An operand of an elementwise operation, broadcast to the result's position ``at``."""
    return sums.read(node, at[len(at) - len(shape_of(node)) :])


@_expands(aten.mul.Tensor)
def _mul(sums, node, at):
    a, b = node.args
    if not isinstance(b, Node):
        return Term([operand(sums, a, at)], constant=float(b)) if isinstance(b, (int, float)) else None
    return Term([operand(sums, a, at), operand(sums, b, at)])


@_expands(aten.mm.default, aten.bmm.default)
def _product(sums, node, at):
    return _matmul(sums, node, *node.args[:2], at)


def _matmul(sums: Sums, node: Node, left: Node, right: Node, at: Position) -> Term:
    k, bound = sums.variable(shape_of(left)[-1], "k", node)
    return Term([sums.read(left, (*at[:-1], k)), sums.read(right, (*at[:-2], k, at[-1]))], list(bound), matmuls=[node])


@_expands(aten.addmm.default, aten.baddbmm.default)
def _product_and_bias(sums, node, at):
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return None
    return _with_bias(_matmul(sums, node, *node.args[1:3], at), operand(sums, node.args[0], at))


def _with_bias(product: Term, bias: Read) -> Term:
    return Term([Sum2(product, bias, bias.variables.union(*(f.variables for f in product.factors)))])


@_expands(aten.add.Tensor)
def _add(sums, node, at):
    a, b = node.args
    if not isinstance(b, Node) or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = operand(sums, a, at), operand(sums, b, at)
    return _with_bias(Term([left]), right)


@_expands(aten.sum.dim_IntList)
def _sum(sums, node, at):
    source, dims, keep = node.args[0], argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    shape = shape_of(source)
    dims = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    below, bound, rest = [], [], iter(at)
    for d, size in enumerate(shape):
        if d not in dims:
            below.append(next(rest))
            continue
        if keep:
            next(rest)
        index, new = sums.variable(size, "sum", node, d)
        below.append(index)
        bound += new
    return Term([sums.read(source, tuple(below))], list(bound), matmuls=[node])


@_expands(aten.where.self)
def _where(sums, node, at):
    condition, yes, no = node.args
    for value, other, keeps in ((yes, no, True), (no, yes, False)):
        if filled(other) == 0.0:
            return Term([condition_factor(sums, operand(sums, condition, at), keeps), *_unless_one(sums, value, at)])
    return None


def condition_factor(sums: Sums, condition: Read, keeps: bool) -> Factor:
    node = condition.node
    while is_call(node, prims.convert_element_type.default) and dtype_of(node.args[0]) == torch.bool:
        condition = operand(sums, node.args[0], condition.at)
        node = condition.node
    if keeps and is_call(node, aten.eq.Tensor):
        a, b = (operand(sums, n, condition.at) for n in node.args)
        return Delta(sums.index(a.node, a.at), sums.index(b.node, b.at))
    if keeps and is_call(node, aten.eq.Scalar) and isinstance(node.args[1], int):
        a = operand(sums, node.args[0], condition.at)
        return Delta(sums.index(a.node, a.at), Const(node.args[1]))
    return Mask(condition, keeps)


def _unless_one(sums: Sums, node: Node, at: Position) -> list[Factor]:
    return [] if filled(node) == 1.0 else [operand(sums, node, at)]


@_expands(prims.convert_element_type.default)
def _converted(sums, node, at):
    """0 and 1, of whatever type; floating conversions are followed by the reader, or round."""
    before = dtype_of(node.args[0])
    if before.is_floating_point:
        return None
    below = operand(sums, node.args[0], at)
    return Term([condition_factor(sums, below, True)] if before == torch.bool else [below])


@_expands(aten.eq.Tensor, aten.eq.Scalar)
def _equal(sums, node, at):
    return Term([condition_factor(sums, Read(node, at), True)])


@_expands(aten.scatter_add.default, aten.scatter.src)
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
    rank = len(shape_of(ids))
    along = {aten.topk.default: argument(many, 2, "dim", -1), aten.sort.default: argument(many, 1, "dim", -1)}.get(many.target)
    return along is not None and along % rank == dim


@_expands(aten.index_put.default)
def _index_put(sums, node, at):
    return added_rows(sums, node, at) if filled(node.args[0]) == 0.0 else None


@_expands(aten.index_add.default)
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
    return Term([entry, sums.read(values, (ix.Row(to.node, tuple(where)), *at[1:]))], bound)


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


@_expands(fp4.dequantize.default)
def _dequantize(sums, node, at):
    return Term([sums.weight(node.args[:3], at[:-2], at[-2], at[-1])])


@_expands(fp4.bmm.default)
def _fp4_bmm(sums, node, at):
    x, *parts = node.args
    k, bound = sums.variable(shape_of(x)[-1], "k", node)
    return Term([sums.weight(tuple(parts), at[:1], at[2], k), sums.read(x, (*at[:-1], k))], list(bound), matmuls=[node])


@_expands(fp4.linear.default)
def _fp4_linear(sums, node, at):
    x, *parts = node.args[:4]
    k, bound = sums.variable(shape_of(x)[-1], "k", node)
    product = Term([sums.weight(tuple(parts), (), at[-1], k), sums.read(x, (*at[:-1], k))], list(bound), matmuls=[node])
    bias = argument(node, 4, "bias")
    return product if bias is None else _with_bias(product, operand(sums, bias, at))


def _grouped(sums, node, at):
    x, w, offsets = node.args[:3]
    if len(node.args) > 3 or node.kwargs or len(shape_of(x)) != 2 or len(shape_of(w)) != 3:
        return None
    k, bound = sums.variable(shape_of(x)[1], "k", node)
    expert = expert_of_row(sums, node, offsets, shape_of(w)[0], at[0])
    return Term([sums.read(x, (at[0], k)), sums.read(w, (expert, k, at[1]))], list(bound), matmuls=[node])


def filled(node: object) -> float | None:
    """The constant a tensor is filled with, or None."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in (aten.expand.default, prims.convert_element_type.default):
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    position = {aten.full.default: 1, aten.scalar_tensor.default: 0, aten.full_like.default: 1}.get(node.target)
    value = node.args[position] if position is not None else None
    return float(value) if isinstance(value, (int, float)) else None
