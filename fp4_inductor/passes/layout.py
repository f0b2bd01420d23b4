"""Follow an operand back to ``fp4.dequantize`` or ``fp4.sparse_dequantize`` through views and conversions; sizes may be symbolic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..formats import nvfp4, sparse24
from . import views

aten, prims = torch.ops.aten, torch.ops.prims
_SAME = views.SAME | {aten.clone.default}
ROOTS = {torch.ops.fp4.dequantize.default: nvfp4.STORAGE, torch.ops.fp4.sparse_dequantize.default: sparse24.STORAGE}
_RESHAPES = views.RESHAPES | {aten.expand.default}
OF_ROWS = views.RESHAPES | views.UNITS | {aten.alias.default}  # they leave rows, and the order of rows, as they are, where the last size stays


@dataclass(frozen=True)
class Origin:
    """``operand[i0, i1, ..] == root[i_axes]``.

    Args:
        root: the dequantize node.
        axes: for each dimension of the operand the dimension of ``root`` it runs along, or None where it is broadcast.
        dtypes: every dtype on the way, ``root``'s first.
        path: the nodes from the operand down to ``root``.
    """

    root: Node
    axes: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]
    path: tuple[Node, ...]


def origin(operand: Node) -> Origin | None:
    """Where ``operand`` comes from, or None if that is not one dequantize op behind axis moves and conversions."""
    axes: list[int | None] = list(range(value(operand).dim()))
    path = [operand]
    node = operand
    while not (node.op == "call_function" and node.target in ROOTS):
        moved = _below(node, axes) if node.op == "call_function" else None
        if moved is None:
            return None
        axes = moved
        node = node.args[0]  # type: ignore[assignment]
        path.append(node)
    return Origin(node, tuple(axes), tuple(value(n).dtype for n in reversed(path)), tuple(path))


def _below(node: Node, axes: list[int | None]) -> list[int | None] | None:
    """``axes`` in terms of ``node.args[0]``; None if ``node`` does more than move or broadcast axes."""
    op: Any = node.target
    args: Any = node.args
    if op in _SAME or op is prims.convert_element_type.default:
        return axes
    if not isinstance(args[0] if args else None, Node) or not isinstance(value(args[0]), Tensor):
        return None  # part of a split, say
    shape, below = value(node).shape, value(args[0]).shape
    if op is aten.permute.default:
        order = [d % len(shape) for d in args[1]]
        return [None if a is None else order[a] for a in axes]
    if op is aten.unsqueeze.default:
        dim = args[1] % len(shape)
        return [None if a is None or a == dim else a - (a > dim) for a in axes]
    if op in _RESHAPES:
        return _broadcast(axes, shape, below, op is aten.expand.default)
    return None


def _broadcast(axes: list[int | None], shape: torch.Size, below: torch.Size, expands: bool) -> list[int | None] | None:
    new = len(shape) - len(below)
    if new < 0 or (new and not expands):
        return None
    repeated = set(range(new))
    for d, size in enumerate(below, start=new):
        if same(size, shape[d]):
            continue
        if not expands or not same(size, 1):
            return None
        repeated.add(d)
    return [None if a is None or a in repeated else a - new for a in axes]


def same(a: object, b: object) -> bool:
    """Equal as integers or as symbolic expressions; never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return a.node.expr == b.node.expr
    return False


def below_views(node: Any) -> Node:
    """``node`` below views that leave its rows as they are."""
    while node.op == "call_function" and node.target in OF_ROWS and same(value(node).shape[-1], value(node.args[0]).shape[-1]):
        node = node.args[0]
    return node


def linear_arguments(linear: Node) -> tuple[Any, ...]:
    """``(x, qdata, scale, global_scale, bias, prefill, rows)`` of a call of ``fp4.linear``."""
    return (*linear.args, *(None, "auto", None)[len(linear.args) - 4 :])


def is_call(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def is_ours(node: Node) -> bool:
    """Does ``node`` call an op of this package, also one that writes an argument?"""
    op: Any = node.args[0] if node.target is torch.ops.higher_order.auto_functionalized_v2 else node.target
    return getattr(op, "namespace", "") == "fp4"


def rows_of(x: object) -> Any:
    """M of an activation ``[..., K]``: an integer, or a symbol. Size.numel() would make a constant of it."""
    return math.prod(value(x).shape[:-1])


def value(node: object) -> Tensor:
    """The fake tensor of ``node``."""
    return node.meta["val"]  # type: ignore[attr-defined]
