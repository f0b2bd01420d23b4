"""The router in front of an ``fp4.moe`` -> ``fp4.router``, on CUDA: two small kernels in place of a product and four more.

``F.linear``, a softmax over all experts or over the chosen ones, ``topk``, the division by the sum of what was chosen: what is found of it behind and in front
of ``aten.topk``, where nothing else reads what lies between. Of other routers :mod:`.topk` takes the choice alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..formats.nvfp4 import HIGH_PRECISION
from ..ops.router import HALF
from .counters import matched
from .emit import emit, erase, item
from .layout import is_call, value
from .moe.read import argument

aten, prims = torch.ops.aten, torch.ops.prims
_MOVES = (aten.permute.default, aten.t.default)


@dataclass(frozen=True)
class _Router:
    operands: tuple[Node, Node, Node | None]  # x, weight [E, H], bias
    form: str
    weights: Node  # what the choice ends in
    ids: Node


def rewrite(graph: Graph, topk: Node) -> bool:
    """Replace the router around ``topk``, whose choice ``fp4.topk`` could make and which serves an ``fp4.moe``; False: it is none of ``fp4.router``'s."""
    found = _read(topk)
    if found is None:
        return False
    last = found.weights
    with graph.inserting_before(topk):  # all that the choice is made of stands above it
        new = emit(graph, torch.ops.fp4.router.default, (*found.operands, argument(topk, 1, "k"), found.form, value(last).dtype))
        parts = [item(graph, new, i) for i in (0, 1)]
    for old, part in zip((last, found.ids), parts, strict=True):
        part.meta = {**old.meta, **part.meta}
        old.replace_all_uses_with(part)
        erase(old)
    matched("router")
    return True


def _read(topk: Node) -> _Router | None:
    outputs = {n.args[1]: n for n in topk.users if is_call(n, operator.getitem)}
    scores: Any = argument(topk, 0, "self")
    if len(outputs) != 2 or len(topk.users) != 2 or len(scores.users) != 1:
        return None
    logits, form = _below_softmax(scores), "softmax"
    if logits is None:
        logits, form = scores, "chosen"
    operands = _linear(logits)
    last: Node | None = outputs[0]
    if form == "chosen":
        last = _softmax_of(outputs[0])
    elif (divided := _divided_by_sum(outputs[0])) is not None:
        last, form = divided, "normalized"
    if operands is None or last is None:
        return None
    user = next(iter(last.users), None)
    if len(last.users) == 1 and is_call(user, prims.convert_element_type.default) and value(user).dtype in HIGH_PRECISION:
        last = user
    return _Router(operands, form, last, outputs[1])  # type: ignore[arg-type]


def _below_softmax(scores: Node) -> Node | None:
    """The ``x`` of ``softmax(x.float())`` over the last dimension, as it was decomposed, which nothing else reads."""
    if not is_call(scores, aten.div.Tensor) or value(scores).dtype != torch.float32:
        return None
    e, total = scores.args
    if not (is_call(e, aten.exp.default) and _over_last(total, aten.sum.dim_IntList, e) and set(e.users) == {scores, total}):  # type: ignore[union-attr]
        return None
    difference: Any = e.args[0]  # type: ignore[union-attr]
    if not is_call(difference, aten.sub.Tensor) or len(difference.users) != 1:
        return None
    wide, peak = difference.args
    if not _over_last(peak, aten.amax.default, wide) or set(wide.users) != {difference, peak}:
        return None
    converted = is_call(wide, prims.convert_element_type.default) and value(wide).dtype == torch.float32
    return wide.args[0] if converted else wide


def _softmax_of(values: Node) -> Node | None:
    """The softmax of the chosen scores ``values``, in float32."""
    wide = values
    if value(wide).dtype != torch.float32:
        wide = _only_user(values, prims.convert_element_type.default)  # type: ignore[assignment]
    for user in wide.users if wide is not None else ():
        last = _only_user(next(iter(user.users)), aten.div.Tensor, of=2) if is_call(user, aten.sub.Tensor) and len(user.users) == 1 else None
        if last is not None and (found := _below_softmax(last)) is not None and found in (values, wide):
            return last
    return None


def _divided_by_sum(values: Node) -> Node | None:
    divided = next((n for n in values.users if is_call(n, aten.div.Tensor)), None)
    if divided is None or divided.args[0] is not values or not _over_last(divided.args[1], aten.sum.dim_IntList, values):
        return None
    return divided if set(values.users) == {divided, divided.args[1]} else None


def _only_user(node: Node, target: object, of: int = 1) -> Node | None:
    """The user of ``node`` that calls ``target``, if it has ``of`` users."""
    return next((n for n in node.users if is_call(n, target)), None) if len(node.users) == of else None


def _over_last(node: object, target: object, of: object) -> bool:
    """``target(of, dim=last, keepdim=True)``, read once."""
    return (
        is_call(node, target)
        and isinstance(node, Node)
        and node.args[0] is of
        and len(node.users) == 1
        and argument(node, 1, "dim") in ([-1], [1])
        and argument(node, 2, "keepdim", False) is True
    )


def _linear(logits: Node) -> tuple[Node, Node, Node | None] | None:
    """``(x, weight, bias)`` of a linear layer of few outputs in a half precision."""
    found: Any
    if is_call(logits, aten.mm.default):
        found = (*logits.args, None)
    elif is_call(logits, aten.addmm.default) and not logits.kwargs and value(logits.args[0]).dim() == 1:
        found = (*logits.args[1:], logits.args[0])
    else:
        found = (*_decomposed(logits), None)
    x, moved, bias = found
    if len(logits.users) != 1 or not any(is_call(moved, move) for move in _MOVES) or (len(moved.args) > 1 and list(moved.args[1]) != [1, 0]):
        return None
    return (x, moved.args[0], bias) if value(logits).dtype in HALF else None


def _decomposed(logits: Node) -> tuple[Any, Any]:
    """``x`` and ``w`` of ``(x[:, :, None].float() * w[None].float()).sum(1)``, which max-autotune makes of one row's product."""
    total: Any = logits.args[0] if is_call(logits, prims.convert_element_type.default) else None
    if not is_call(total, aten.sum.dim_IntList) or list(total.args[1]) != [1] or len(total.users) != 1 or not is_call(total.args[0], aten.mul.Tensor):
        return None, None
    factors = []
    for factor, dim in zip(total.args[0].args, (2, 0), strict=True):
        if not is_call(factor, aten.unsqueeze.default) or factor.args[1] != dim or not is_call(factor.args[0], prims.convert_element_type.default):
            return None, None
        factors.append(factor.args[0].args[0])
    same = all(value(factor).dtype == value(logits).dtype for factor in factors)
    return (factors[0], factors[1]) if same else (None, None)
