"""Does every part of a layer follow the same choice of experts?"""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .index import Index, Unproven, Value
from .read import Read, aten, prims, shape_of
from .sums import Mask, Sums

_POSITIONS = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim}
_NEVER_NEGATIVE = {aten.argmax.default, aten.argmin.default, aten.abs.default, aten.multinomial.default, prims.iota.default}
_KEEP_SIGN = {
    aten.reshape.default, aten.permute.default, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.index.Tensor, aten.clamp_max.default, prims.convert_element_type.default,
}  # fmt: skip
_CLAMPS = {aten.clamp_min.default: "low", aten.clamp_max.default: "high"}


def one_bias(sums: Sums, reads: list[Read | None], ns: list[Index], expert: Index, rows: sympy.Expr, experts: sympy.Expr) -> Read | None:
    if all(r is None for r in reads):
        return None
    first = reads[0]
    for read, n in zip(reads, ns, strict=True):
        if read is None or first is None or read.node is not first.node or len(read.at) != 2 or read.at[1] != n:
            raise Unproven("a bias that is not one row per expert", 2)
        if not ix.equal(shape_of(read.node)[0], experts) or not ix.equal(shape_of(read.node)[1], rows):
            raise Unproven("a bias that is not one row per expert", 2)
        if not same_expert(sums, read.at[0], expert, experts):
            raise Unproven("a bias of another expert", 2)
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
        raise Unproven("rows are masked between the products that are not masked behind them", 3)
    return [m for m in masks if not _out_of_range(sums, m, ids, experts)]


def _out_of_range(sums: Sums, mask: Mask, ids: Value, experts: sympy.Expr) -> bool:
    """The mask leaves out ``ids`` that are no expert, as fp4.moe does by itself. (Not if those have been clamped for it.)"""
    node = mask.condition.node
    target: Any = node.target
    wanted = {aten.ge.Scalar: (experts, False), aten.lt.Scalar: (experts, True), aten.gt.Scalar: (experts - 1, False), aten.le.Scalar: (experts - 1, True)}
    limit, keeps = wanted.get(target, (None, None))
    return keeps is mask.keeps and node.args[1] == limit and sums.index(node.args[0], mask.condition.at) == ids  # type: ignore[arg-type]


def may_be_negative(ids: Node, depth: int = 16) -> bool:
    """Whether an id could be counted from the end, as an index does with a negative number and ``fp4.moe`` does not."""
    if ids.op != "call_function" or depth == 0:
        return True
    target: Any = ids.target
    args: Any = ids.args
    if target is operator.getitem:
        return args[1] != 1 or getattr(args[0], "target", None) not in _POSITIONS
    if target in (aten.clamp_min.default, aten.clamp.default) and isinstance(args[1], int):
        return args[1] < 0 and may_be_negative(args[0], depth - 1)
    if target is aten.remainder.Scalar:
        return not args[1] > 0
    if target in _KEEP_SIGN:
        return any(may_be_negative(a, depth - 1) for a in ids.all_input_nodes[:1])
    return target not in _NEVER_NEGATIVE
