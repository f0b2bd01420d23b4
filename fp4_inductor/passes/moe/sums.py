"""An element of a tensor as a sum of products: ``sum over bound variables of factor * factor * ..``.

Matrix products of every spelling (mm, bmm, grouped, einsum's, multiply and sum), routing masks, one-hot matrices and
scattered additions all become that one form, in which an MoE layer has one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from ..layout import ROOTS, is_call
from . import index as ix
from .grouped import GROUPED, expert_of_row
from .index import Const, Index, Position, Unproven, Var
from .read import Read, Reader, argument, aten, dtype_of, prims, shape_of

fp4 = torch.ops.fp4
PRODUCTS = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    fp4.linear.default, fp4.sparse_linear.default, fp4.bmm.default,
}  # fmt: skip


@dataclass(frozen=True)
class ExpertEntry:
    """Entry ``(n, k)`` of expert ``expert`` of an NVFP4 weight; ``parts``: its nodes, of all experts, dense or 2:4-sparse, in storage order."""

    parts: tuple[Node, ...]
    expert: Index
    n: Index
    k: Index

    @property
    def shape(self) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """``(E, N, K)``."""
        experts, rows, stored = shape_of(self.parts[0])
        return experts, rows, stored * (2 if len(self.parts) == 3 else 4)

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


Factor: TypeAlias = ExpertEntry | Sum2 | Delta | Mask | Read


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
                raise Unproven(f"{factor.node.target if factor.node.op == 'call_function' else factor.node} is no sum of products")
            total.factors[todo : todo + 1] = found.factors
            if any(v in total.bound for v in found.bound):
                raise Unproven("a sum that is multiplied by itself")
            total.bound += found.bound
            total.constant *= found.constant
            total.matmuls += found.matmuls
            if len(total.factors) > 64:
                raise Unproven("too many factors")
        return total

    def expanded(self, read: Read) -> Term | None:
        """One step: what ``read.node`` computes from its inputs; None if that is no sum of products."""
        node = read.node
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None and node.op == "call_function" and str(node.target) in GROUPED:
            rule = _grouped
        return None if rule is None else rule(self, node, read.at)

    def weight(self, parts: tuple[Node, ...], lead: Position, n: Index, k: Index) -> ExpertEntry:
        """The entry of dequantised ``parts`` at ``(*lead, n, k)``, followed to the weight of all experts."""
        if is_call(parts[0], fp4.sparse_decompress.default):
            parts = (*parts[0].args, *parts[1:])  # type: ignore[assignment]
        *matrices, global_scale = parts
        row = Var(shape_of(matrices[0])[-2], ("row",))
        codes, *others = (self._whole(part, lead, row) for part in matrices)
        factor = self.read(global_scale, lead)
        of_factor = ix.join(zip(factor.at, shape_of(factor.node), strict=True))
        if len(shape_of(codes.node)) != 3:
            raise Unproven("a weight that is not one matrix per expert")
        if any(codes.at[:2] != other.at[:2] for other in others) or codes.at[0] != of_factor:
            raise Unproven("codes, scales and global scales are taken from different experts or rows")
        whole = (codes.node, *(other.node for other in others), factor.node)
        return ExpertEntry(whole, codes.at[0], ix.substitute(codes.at[1], {row: n}), k)

    def _whole(self, part: Node, lead: Position, row: Var) -> Read:
        column = Var(shape_of(part)[-1], ("column",))
        found = self.read(part, (*lead, row, column))
        if found.at[-1] is not column and shape_of(part)[-1] != 1:
            raise Unproven("a weight whose columns are rearranged")
        return found


Rule = Callable[[Sums, Node, Position], "Term | None"]
_RULES: dict[Any, Rule] = {}


def expands(*ops: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def operand(sums: Sums, node: Node, at: Position) -> Read:
    """An operand of an elementwise operation, broadcast to the result's position ``at``."""
    return sums.read(node, at[len(at) - len(shape_of(node)) :])


@expands(aten.mul.Tensor)
def _mul(sums, node, at):
    a, b = node.args
    if not isinstance(b, Node):
        return Term([operand(sums, a, at)], constant=float(b)) if isinstance(b, (int, float)) else None
    return Term([operand(sums, a, at), operand(sums, b, at)])


@expands(aten.mm.default, aten.bmm.default)
def _product(sums, node, at):
    return _matmul(sums, node, node.args[0], node.args[1], at)


def _matmul(sums: Sums, node: Node, left: Node, right: Node, at: Position) -> Term:
    k, bound = sums.variable(shape_of(left)[-1], "k", node)
    return Term([sums.read(left, (*at[:-1], k)), sums.read(right, (*at[:-2], k, at[-1]))], list(bound), matmuls=[node])


@expands(aten.addmm.default, aten.baddbmm.default)
def _product_and_bias(sums, node, at):
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return None
    return _with_bias(_matmul(sums, node, node.args[1], node.args[2], at), operand(sums, node.args[0], at))


def _with_bias(product: Term, bias: Read) -> Term:
    return Term([Sum2(product, bias, bias.variables.union(*(f.variables for f in product.factors)))])


@expands(aten.add.Tensor)
def _add(sums, node, at):
    a, b = node.args
    if not isinstance(b, Node) or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = operand(sums, a, at), operand(sums, b, at)
    return _with_bias(Term([left]), right)


@expands(aten.sum.dim_IntList)
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


@expands(aten.where.self)
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


@expands(prims.convert_element_type.default)
def _converted(sums, node, at):
    """0 and 1, of whatever type; floating conversions are followed by the reader, or round."""
    before = dtype_of(node.args[0])
    if before.is_floating_point:
        return None
    below = operand(sums, node.args[0], at)
    return Term([condition_factor(sums, below, True)] if before == torch.bool else [below])


@expands(aten.eq.Tensor, aten.eq.Scalar)
def _equal(sums, node, at):
    return Term([condition_factor(sums, Read(node, at), True)])


@expands(*ROOTS)
def _dequantize(sums, node, at):
    return Term([sums.weight(node.args[: len(ROOTS[node.target].parts)], at[:-2], at[-2], at[-1])])


@expands(fp4.bmm.default)
def _fp4_bmm(sums, node, at):
    x, *parts = node.args
    k, bound = sums.variable(shape_of(x)[-1], "k", node)
    return Term([sums.weight(tuple(parts), at[:1], at[2], k), sums.read(x, (*at[:-1], k))], list(bound), matmuls=[node])


@expands(fp4.linear.default, fp4.sparse_linear.default)
def _fp4_linear(sums, node, at):
    after = 4 if node.target is fp4.linear.default else 5
    if argument(node, after + 2, "rows"):
        return None  # several global scales: no expert has them
    x, *parts = node.args[:after]
    k, bound = sums.variable(shape_of(x)[-1], "k", node)
    product = Term([sums.weight(tuple(parts), (), at[-1], k), sums.read(x, (*at[:-1], k))], list(bound), matmuls=[node])
    bias = argument(node, after, "bias")
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
    target: Any = node.target
    position = {aten.full.default: 1, aten.scalar_tensor.default: 0, aten.full_like.default: 1}.get(target)
    value = node.args[position] if position is not None else None
    return float(value) if isinstance(value, (int, float)) else None
