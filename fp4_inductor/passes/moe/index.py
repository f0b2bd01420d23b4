"""Where a tensor is read: index expressions over named variables, with symbolic sizes.

An element of an MoE layer's result is a formula over variables: token, slot, hidden and intermediate channel. Views only
regroup them (a row of ``[T * k, H]`` is the pair (token, slot)), gathers replace one by a value that is read elsewhere
(the expert's number is ``ids[token, slot]``), sorting puts a permutation in between, which the un-sorting takes out again.
Two graphs of one layer give the same expressions here, however they were written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node


class Unproven(Exception):  # noqa: N818  (a verdict about a graph; its text is what explain() shows)
    """This part of the graph is not the MoE layer being looked for. ``stage`` says how far the proof had come."""

    def __init__(self, reason: str, stage: int = 0):
        super().__init__(reason)
        self.reason, self.stage = reason, stage


class Unaligned(Exception):  # noqa: N818
    """A reshape regroups dimensions in a way that has no position expression."""


class Split(Exception):  # noqa: N818
    """``var`` runs over a product of dimensions that are needed one by one."""

    def __init__(self, var: Var, sizes: tuple[sympy.Expr, ...]):
        super().__init__(f"{var} -> {sizes}")
        self.var, self.sizes = var, sizes


@dataclass(frozen=True, eq=False)
class Var:
    """Runs over ``range(size)``. ``origin`` names where it comes from, the same in a second proof of the same graph."""

    size: sympy.Expr
    origin: tuple


@dataclass(frozen=True)
class Const:
    value: int


@dataclass(frozen=True)
class Shift:
    """``step * index + start``."""

    index: Index
    step: int
    start: int


@dataclass(frozen=True)
class Value:
    """The integer that ``node`` holds at ``at``; for a sort node, entry ``at`` of its permutation."""

    node: Node
    at: tuple[Index, ...]


@dataclass(frozen=True)
class Inverse:
    """The place at which the permutation of the sort node ``sort`` holds ``index``."""

    sort: Node
    index: Index


@dataclass(frozen=True)
class NonzeroRow:
    """The row in which ``nonzero`` lists the entry of its input at ``at``, where that is not zero."""

    nonzero: Node
    at: tuple[Index, ...]


@dataclass(frozen=True)
class Div:
    """``index // by`` where the digits of ``index`` are not known."""

    index: Index
    by: int


@dataclass(frozen=True)
class Flat:
    """A number in mixed radix, the most significant digit first: two digits or more, none of size 1."""

    digits: tuple[tuple[Index, sympy.Expr], ...]


Index: TypeAlias = Var | Const | Shift | Value | Inverse | NonzeroRow | Div | Flat
Position: TypeAlias = tuple[Index, ...]
ZERO = Const(0)


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A dimension's size as an expression; never adds a guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or sympy.expand(a - b) == 0


def product(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    return math.prod(sizes, start=sympy.Integer(1))


@functools.lru_cache(maxsize=4096)
def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b if that divides evenly as a polynomial."""
    if b == 0:
        return None
    if a.is_Integer and b.is_Integer:
        return a // b if a % b == 0 else None
    numerator, denominator = sympy.fraction(sympy.cancel(a / b))
    return numerator if denominator == 1 else None


def digits(index: Index, size: sympy.Expr) -> tuple[tuple[Index, sympy.Expr], ...]:
    if isinstance(index, Flat):
        return index.digits
    return () if size == 1 else ((index, size),)


def join(parts: Iterable[tuple[Index, sympy.Expr]]) -> Index:
    """The row-major number of a position; ``parts`` are (index, size) of each dimension."""
    found = tuple(d for index, size in parts for d in digits(index, size))
    if not found or all(d == ZERO for d, _ in found):
        return ZERO
    return found[0][0] if len(found) == 1 else Flat(found)


def split(index: Index, size: sympy.Expr, shape: Sequence[sympy.Expr]) -> Position:
    """The position in ``shape`` of row-major number ``index`` in ``range(size)``.

    Raises:
        Split: a variable would have to be taken apart for that.
        Unaligned: the dimensions do not line up.
    """
    if index == ZERO:
        return (ZERO,) * len(shape)
    rest = list(digits(index, size))
    out: list[Index] = []
    for wanted in reversed(shape):
        taken: list[tuple[Index, sympy.Expr]] = []
        while not equal(product(s for _, s in taken), wanted):
            if not rest:
                raise Unaligned
            digit, extent = rest.pop()
            missing = quotient(wanted, product(s for _, s in taken))
            if missing is not None and quotient(missing, extent) is not None:
                taken.insert(0, (digit, extent))
                continue
            above = None if missing is None else quotient(extent, missing)
            if above is None:
                raise Unaligned
            if isinstance(digit, Var):
                raise Split(digit, (above, missing))
            if not isinstance(digit, Const) or not missing.is_Integer:
                raise Unaligned
            rest.append((Const(digit.value // int(missing)), above))
            taken.insert(0, (Const(digit.value % int(missing)), missing))
        out.insert(0, join(taken))
    if any(d != ZERO and s != 1 for d, s in rest):
        raise Unaligned
    return tuple(out)


def shift(index: Index, step: int, start: int) -> Index:
    if isinstance(index, Const):
        return Const(index.value * step + start)
    if isinstance(index, Shift):
        return Shift(index.index, index.step * step, index.start * step + start)
    return index if (step, start) == (1, 0) else Shift(index, step, start)


def permuted(sort: Node, index: Index) -> Index:
    """Entry ``index`` of the permutation that ``sort`` returns."""
    return index.index if isinstance(index, Inverse) and index.sort is sort else Value(sort, (index,))


def inverse(sort: Node, index: Index) -> Index:
    return index.at[0] if isinstance(index, Value) and index.node is sort else Inverse(sort, index)


def divide(index: Index, by: int) -> Index:
    """``index // by``."""
    if by == 1:
        return index
    if isinstance(index, Const):
        return Const(index.value // by)
    known = (index,) if isinstance(index, (Var, Flat)) else ()
    if not known:
        return Div(index, by)
    parts = list(digits(index, index.size if isinstance(index, Var) else sympy.Integer(0)))
    below = sympy.Integer(1)
    while parts and not equal(below, sympy.Integer(by)):
        below *= parts.pop()[1]
    return join(parts) if equal(below, sympy.Integer(by)) else Div(index, by)


def substitute(index: Index, new: dict[Var, Index]) -> Index:
    """``index`` with variables replaced, simplified again."""
    if isinstance(index, Var):
        return new.get(index, index)
    if isinstance(index, Shift):
        return shift(substitute(index.index, new), index.step, index.start)
    if isinstance(index, Value):
        at = tuple(substitute(i, new) for i in index.at)
        return permuted(index.node, at[0]) if is_sort(index.node) else Value(index.node, at)
    if isinstance(index, NonzeroRow):
        return NonzeroRow(index.nonzero, tuple(substitute(i, new) for i in index.at))
    if isinstance(index, Inverse):
        return inverse(index.sort, substitute(index.index, new))
    if isinstance(index, Div):
        return divide(substitute(index.index, new), index.by)
    if isinstance(index, Flat):
        return join((substitute(i, new), s) for i, s in index.digits)
    return index


def variables(what: Index | Position) -> frozenset[Var]:
    """The variables an index, or a position, depends on."""
    if isinstance(what, tuple):
        return frozenset().union(*(variables(i) for i in what))
    if isinstance(what, Var):
        return frozenset((what,))
    if isinstance(what, (Value, NonzeroRow)):
        return variables(what.at)
    if isinstance(what, (Shift, Inverse, Div)):
        return variables(what.index)
    if isinstance(what, Flat):
        return variables(tuple(i for i, _ in what.digits))
    return frozenset()


def affine(index: Index, var: Var) -> tuple[int, int] | None:
    """``(a, b)`` with ``index == a * var + b``; None if it is not of that form, or sizes are symbolic."""
    if index is var:
        return 1, 0
    if isinstance(index, Const):
        return 0, index.value
    if isinstance(index, Shift):
        inner = affine(index.index, var)
        return None if inner is None else (inner[0] * index.step, inner[1] * index.step + index.start)
    if isinstance(index, Flat):
        a, b = 0, 0
        for digit, size in index.digits:
            inner = affine(digit, var)
            if inner is None or not size.is_Integer:
                return None
            a, b = a * int(size) + inner[0], b * int(size) + inner[1]
        return a, b
    return None


def is_sort(node: Node) -> bool:
    return node.op == "call_function" and node.target in (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)
