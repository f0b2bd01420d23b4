"""Read an RMSNorm off a graph, as models and torch's decompositions spell it: ``x * (mean(x^2, -1) + eps) ** -0.5 * (offset + weight)``.

A norm is a product of three factors. Their order, the casts between them, and how a power or a mean is written differ from model to model:

    Llama, Qwen3, Mistral    weight * (x32 * rsqrt(mean(x32 ** 2) + eps)).to(dtype)
    Gemma                    (x32 * rsqrt(mean(x32 ** 2) + eps) * (1 + weight.float())).to(dtype)
    gpt-oss, torch           (weight * (x32 * rsqrt(mean(x32 ** 2) + eps))).to(dtype)
    vLLM                     one operator, which it decomposes behind these passes (:mod:`.operators`)

Inductor keeps none of the roundings between them where it fuses them into one kernel, so these are one function: all of it in float32, rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from . import views
from .glu import CASTS, same_shape
from .layout import is_call, same, value
from .operators import NORMS, name_of

aten = torch.ops.aten
_VIEWS = views.RESHAPES | views.UNITS | views.SAME | {aten.expand.default, aten.clone.default}
_FUSED = getattr(aten, "_fused_rms_norm", None)
_MANY = 24  # factors and casts that are looked at


@dataclass(frozen=True)
class RMSNorm:
    """A norm whose result is ``y``.

    Args:
        x: what it reads, ``[..., K]``.
        weight: ``[K]``; None: it has none.
        eps, offset: ``(mean + eps)`` and ``(offset + weight)``.
        inside: every node that is computed for it, ``y`` included. Not ``x``, casts of it that lose nothing, and what is done to
            ``weight``: others may read them, too.
    """

    y: Node
    x: Node
    weight: Node | None
    eps: float
    offset: float
    inside: frozenset[Node]


class _OtherError(Exception):
    """This is not an RMSNorm."""


def read(y: Node) -> RMSNorm | None:
    """The norm whose result ``y`` is; None if it is not that of one."""
    if is_call(y, operator.getitem) and y.args[1] == 0 and _FUSED is not None and is_call(y.args[0], _FUSED.default):
        return _fused(y)
    if name_of(y.target) in NORMS:
        return _operator(y)
    for root in _roots(y):
        try:
            return _Reader(y, root).norm()
        except _OtherError:
            continue
    return None


def _fused(y: Node) -> RMSNorm | None:
    """Of ``aten._fused_rms_norm(x, [K], weight, eps)``."""
    call: Any = y.args[0]
    x, shape, weight, eps = (*call.args, None, None)[:4]
    if len(shape) != 1 or not isinstance(eps, float) or any(user is not y and user.users for user in call.users):
        return None
    return RMSNorm(y, x, weight, eps, 0.0, frozenset({y, call, *call.users}))


def _operator(y: Node) -> RMSNorm | None:
    """Of ``norm(x, weight, eps, ...)``."""
    args: Any = y.args
    if y.kwargs or len(args) < 3 or any(a is not None for a in args[3:]) or not isinstance(args[2], float):
        return None
    try:
        weight, offset = (None, 0.0) if args[1] is None else _weight(args[1], y)
    except _OtherError:
        return None
    return RMSNorm(y, args[0], weight, args[2], offset, frozenset({y}))


def _roots(y: Node) -> list[Node]:
    """The factors and divisors of ``y`` that are an inverse square root, or a square root, the nearest one first."""
    found, waiting = [], [y]
    for node in waiting:  # which grows
        if _radicand(node) is not None:
            found.append(node)
        elif len(waiting) < _MANY and node.op == "call_function" and node.target in (aten.mul.Tensor, aten.div.Tensor, *CASTS, *_VIEWS):
            waiting += [n for n in node.all_input_nodes if n not in waiting]
    return found


def _radicand(node: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """``(v, power, nodes)`` of a ``node`` that is v to the power of -0.5 or 0.5."""
    args: Any = node.args
    if is_call(node, aten.rsqrt.default):
        return args[0], -0.5, (node,)
    if is_call(node, aten.sqrt.default):
        return args[0], 0.5, (node,)
    if is_call(node, aten.pow.Tensor_Scalar) and args[1] in (0.5, -0.5):
        return args[0], float(args[1]), (node,)
    if is_call(node, aten.reciprocal.default) or (is_call(node, aten.mul.Tensor) and args[1] == 1):  # 1 / root is the product of both
        below = _radicand(args[0])
        sign = 1 if node.target is aten.mul.Tensor else -1
        return None if below is None else (below[0], sign * below[1], (node, *below[2]))
    return None


class _Reader:
    """Reads ``y`` as a norm whose (inverse) root mean square is ``root``."""

    def __init__(self, y: Node, root: Node):
        self.y, self.root = y, root
        self.inside: set[Node] = set()
        self.x, self.eps, self.power = self._statistic()
        self.weights: list[Node] = []
        self.counted = dict(x=0, root=0)

    def norm(self) -> RMSNorm:
        self._factor(self.y)
        if self.counted != dict(x=1, root=1) or len(self.weights) > 1 or not same_shape(self.x, self.y):
            raise _OtherError
        weight, offset = _weight(self.weights[0], self.y) if self.weights else (None, 0.0)
        # A node in less than the precision of the result would have rounded on the way; a view to another shape would have mixed rows.
        shape = value(self.y).shape
        shapes = (shape, shape[:-1], (*shape[:-1], 1))
        if any(value(n).dtype not in (torch.float32, value(self.y).dtype) or not any(_equal(value(n).shape, s) for s in shapes) for n in self.inside):
            raise _OtherError
        return RMSNorm(self.y, self.x, weight, self.eps, offset, frozenset(self.inside))

    def _statistic(self) -> tuple[Node, float, float]:
        """``(x, eps, power)`` of ``root``, which is ``(mean(x * x, -1) + eps) ** power``."""
        found = _radicand(self.root)
        if found is None:
            raise _OtherError
        total, power, nodes = found
        self.inside |= {*nodes}
        total = self._bare(total)
        eps = _number(total.args[1]) if is_call(total, aten.add.Tensor) or is_call(total, aten.add.Scalar) else None
        if eps is None:
            raise _OtherError
        self.inside.add(total)
        return self._mean_of_squares(self._bare(total.args[0])), eps, power

    def _mean_of_squares(self, mean: Node) -> Node:
        """x of ``mean(x * x, -1)``, or of a sum and a division."""
        self.inside.add(mean)
        args: Any = mean.args
        if is_call(mean, aten.mean.dim):
            squares = args[0]
        elif (is_call(mean, aten.div.Tensor) or is_call(mean, aten.mul.Tensor)) and _number(args[1]) is not None:
            mean, count, divides = self._bare(args[0]), args[1], is_call(mean, aten.div.Tensor)
            self.inside.add(mean)
            if not is_call(mean, aten.sum.dim_IntList):
                raise _OtherError
            args, squares = mean.args, mean.args[0]
            width = value(squares).shape[-1]
            if not isinstance(width, int) or (count if divides else 1 / count) != width:
                raise _OtherError
        else:
            raise _OtherError
        if list(args[1]) not in ([-1], [value(squares).dim() - 1]):
            raise _OtherError
        squares = self._bare(squares)
        self.inside.add(squares)
        args = squares.args
        if (is_call(squares, aten.pow.Tensor_Scalar) and args[1] == 2) or (is_call(squares, aten.mul.Tensor) and _are_equal(*args)):
            return exact(args[0])
        raise _OtherError

    def _bare(self, node: Any) -> Node:
        """``node`` below casts and changes of shape, which are inside the norm."""
        while isinstance(node, Node) and node.op == "call_function" and node.target in CASTS | _VIEWS:
            self.inside.add(node)
            node = node.args[0]
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), Tensor):
            raise _OtherError
        return node

    def _factor(self, node: Any, divisor: bool = False) -> None:
        """Sort the factors of ``node``: x, the root, weights."""
        if not isinstance(node, Node) or len(self.inside) > 2 * _MANY:
            raise _OtherError
        if exact(node) is self.x and not divisor:
            self.counted["x"] += 1
        elif node is self.root:
            if (self.power > 0) != divisor:
                raise _OtherError
            self.counted["root"] += 1
        elif is_call(node, aten.mul.Tensor) and not divisor:
            self.inside.add(node)
            for factor in node.args:
                self._factor(factor)
        elif is_call(node, aten.div.Tensor) and not divisor:
            self.inside.add(node)
            self._factor(node.args[0])
            self._factor(node.args[1], divisor=True)
        elif node.op == "call_function" and node.target in CASTS | _VIEWS and self._holds_more(node):
            self.inside.add(node)
            self._factor(node.args[0], divisor)
        elif divisor:
            raise _OtherError
        else:
            self.weights.append(node)

    def _holds_more(self, node: Node) -> bool:
        """Is ``node`` a cast of a factor, or the root in another shape? A weight's casts and shapes are read by :func:`_weight`."""
        while node.op == "call_function" and node.target in CASTS | _VIEWS:
            shaped = node.target in _VIEWS
            node = node.args[0]  # type: ignore[assignment]
            if node is self.root:
                return True
            if shaped and exact(node) is self.x:
                return False  # in another shape, a row is another one
        return is_call(node, aten.mul.Tensor) or is_call(node, aten.div.Tensor)


def _weight(node: Node, y: Node) -> tuple[Node, float]:
    """``(weight [K], offset)`` of a factor of ``y`` that varies along the last dimension only."""
    if not _is_a_row(node, y) and node.target is not aten.expand.default:
        raise _OtherError
    offset = None
    while node.op == "call_function":
        args: Any = node.args
        if offset is None and node.target in (aten.add.Tensor, aten.add.Scalar) and not node.kwargs:
            a, b = args[:2]
            offset, below = (_number(a), b) if _number(b) is None else (_number(b), a)
            if offset is None:
                break
        elif node.target in _VIEWS or (node.target in CASTS and exact(node) is not node):
            below = args[0]
        else:
            break
        if not _is_a_row(below, y):
            raise _OtherError
        node = below
    if value(node).dim() != 1:
        raise _OtherError
    return node, offset or 0.0


def _is_a_row(node: Any, of: Node) -> bool:
    """Is ``node`` as long as the rows of ``of``, and the same for each of them?"""
    shape = value(node).shape if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor) else ()
    return len(shape) > 0 and same(shape[-1], value(of).shape[-1]) and all(same(size, 1) for size in shape[:-1])


def exact(node: Node) -> Node:
    """``node`` below casts that lose nothing."""
    while node.op == "call_function" and node.target in CASTS:
        below: Any = node.args[0]
        if not isinstance(below, Node) or torch.promote_types(value(below).dtype, value(node).dtype) != value(node).dtype:
            return node
        node = below
    return node


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def _are_equal(a: Any, b: Any) -> bool:
    """Are both one node, or casts of one that lose nothing?"""
    return isinstance(a, Node) and isinstance(b, Node) and exact(a) is exact(b)


def _number(arg: Any) -> float | None:
    """A number, or a tensor that is filled with one."""
    if isinstance(arg, Node) and is_call(arg, aten.full.default) and not arg.args[0]:
        arg = arg.args[1]
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None
