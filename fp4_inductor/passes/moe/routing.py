"""Does every part of a layer follow the same choice of experts?"""

from __future__ import annotations

from typing import Any

import sympy

from ..layout import is_call
from . import index as ix
from .index import Index, Refused, Value
from .read import Read, aten, shape_of
from .sums import Mask, Sums

_CLAMPS = {aten.clamp_min.default: "low", aten.clamp_max.default: "high"}


def one_bias(sums: Sums, reads: list[Read | None], ns: list[Index], expert: Index, rows: sympy.Expr, experts: sympy.Expr) -> Read | None:
    if all(r is None for r in reads):
        return None
    first = reads[0]
    for read, n in zip(reads, ns, strict=True):
        if read is None or first is None or read.node is not first.node or len(read.at) != 2 or read.at[1] != n:
            raise Refused("a bias that is not one row per expert", 2)
        if not ix.equal(shape_of(read.node)[0], experts) or not ix.equal(shape_of(read.node)[1], rows):
            raise Refused("a bias that is not one row per expert", 2)
        if not same_expert(sums, read.at[0], expert, experts):
            raise Refused("a bias of another expert", 2)
    return first


def same_expert(sums: Sums, a: Index, b: Index, experts: sympy.Expr) -> bool:
    """Equal, up to a clamp into the range of experts: an id outside it has no weight to be read."""
    return _unclamped(sums, a, experts) == _unclamped(sums, b, experts)


def _unclamped(sums: Sums, index: Index, experts: sympy.Expr) -> Index:
    while isinstance(index, Value) and index.node.op == "call_function":
        node = index.node
        low, high = None, None
        if node.target in _CLAMPS:
            bound = node.args[1]
            low, high = (bound, None) if _CLAMPS[node.target] == "low" else (None, bound)
        elif is_call(node, aten.clamp.default):
            low, high = (*node.args[1:], None, None)[:2]
        if (low, high) == (None, None) or low not in (None, 0) or (high is not None and high != experts - 1):
            return index
        index = sums.index(node.args[0], index.at)  # type: ignore[arg-type]
    return index


def masks_left(sums: Sums, masks: list[Mask], inside: list[Mask], ids: Value, experts: sympy.Expr) -> list[Mask]:
    """The masks that ``fp4.moe`` does not imply. What is masked inside must be masked at the end: a pair is left out as a whole."""
    if any(m not in masks for m in inside):
        raise Refused("rows are masked between the products that are not masked behind them", 3)
    return [m for m in masks if not _out_of_range(sums, m, ids, experts)]


def _out_of_range(sums: Sums, mask: Mask, ids: Value, experts: sympy.Expr) -> bool:
    """The mask leaves out ``ids`` that are no expert, as fp4.moe does by itself. (Not if those have been clamped for it.)"""
    node = mask.condition.node
    target: Any = node.target
    wanted = {aten.ge.Scalar: (experts, False), aten.lt.Scalar: (experts, True), aten.gt.Scalar: (experts - 1, False), aten.le.Scalar: (experts - 1, True)}
    limit, keeps = wanted.get(target, (None, None))
    return keeps is mask.keeps and node.args[1] == limit and sums.index(node.args[0], mask.condition.at) == ids  # type: ignore[arg-type]
