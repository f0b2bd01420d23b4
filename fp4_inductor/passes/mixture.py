"""The router of a mixture of experts, the norm in front of it, its experts and the residual, for one row -> the ``fp4.linear_chain`` of their two products.

    h = norm(x);  weights, ids = router(h);  y = moe(h, ids, weights) + residual    ->    _, y = linear_chain(x, [gate_up, down], router, ...)

Five kernels are one launch then, and :mod:`.chain` joins it with the products in front of it and behind it. It runs ahead of :mod:`.norm`: what the launch
writes is in memory, so the next norm becomes a part of the product that reads it. The layer of one row stays as it is where the
kernel does not take it; ``explain()`` gives the reason. Of more rows, and where the kernel is off, nothing is said: ``fp4.moe`` has kernels of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region
from ..config import dispatch_config
from ..kernels import select
from ..kernels.select import plan
from ..ops.activation import ActivationCode
from ..ops.linear_chain import MOST, MOST_CHOSEN, MOST_EXPERTS, MOST_INNER, ROUTER_ROWS, Product, Routing
from ..ops.moe_call import MoeCall
from . import chain, views
from .counters import matched
from .emit import emit, erase, item
from .layout import below_views, is_call, rows_of, value
from .missed import UNCHAINED, missed
from .rms_norm import RMSNorm, read

aten, fp4 = torch.ops.aten, torch.ops.fp4
_SAME = views.RESHAPES | views.UNITS | views.SAME
_COPIES = _SAME | {aten.clone.default}


def fuse(graph: Graph) -> None:
    """Rewrite every such layer in ``graph``."""
    for moe in graph.find_nodes(op="call_function", target=fp4.moe.default):
        x: Any = moe.args[0]
        rows = rows_of(x)
        if value(x).device.type != "cuda" or type(rows) is not int or rows != 1 or _plan(moe).pick(1).library is None or not moe.users:
            continue
        reason = _why_not(moe)
        norm = read(below_views(x)) if not reason else None
        routed = _routed(moe, norm) if norm is not None else "no RMSNorm of one weight stands in front of the router and the experts"
        arrivals = chain.arrivals_before(graph, moe, MOST) if not isinstance(routed, str) and not reason else ""
        reason = reason or next((found for found in (routed, arrivals) if isinstance(found, str)), "")
        if reason:
            missed(moe, value(moe), reason, UNCHAINED)
            continue
        _rewrite(graph, moe, norm, routed, arrivals)  # type: ignore[arg-type]


def _plan(moe: Node) -> Any:
    x: Any = moe.args[0]
    call = MoeCall.of(*moe.args, **moe.kwargs)
    n, half_k = value(call.gate_up.qdata).shape[1:]
    return plan(select.describe("linear_chain", value(x).device, value(x).dtype, n, 2 * half_k, call.prefill), dispatch_config())


def _why_not(moe: Node) -> str:
    """Why the experts are not part of one launch; empty: they are."""
    call = MoeCall.of(*moe.args, **moe.kwargs)
    act, weights = call.activation, (call.gate_up, call.down)
    if any(w.meta is not None for w in weights):
        return "experts are 2:4-sparse"
    if any(w.bias is not None for w in weights):
        return "experts have biases"
    if call.weight_on_input or call.expert_map is not None:
        return "the router's weight multiplies what the experts read" if call.weight_on_input else "experts are on several devices"
    (e, rows, half_k), (_, width, half_inner) = (value(w.qdata).shape for w in weights)
    inner, k = 2 * half_inner, value(call.expert_ids).shape[-1]
    if act.interleaved or act.limit is not None or act.alpha != 1.0 or act.name.upper() not in ActivationCode.__members__ or rows != 2 * inner:
        return f"one launch has no experts with {act}"
    if any(type(size) is not int for size in (e, rows, half_k, width, inner, k)):
        return "a size of the experts is known at run time only"
    most = ROUTER_ROWS * torch.cuda.get_device_properties(value(moe.args[0]).device).multi_processor_count
    limits = (("experts", e, min(MOST_EXPERTS, most)), ("experts of a token", k, MOST_CHOSEN), ("numbers between their products", k * inner, MOST_INNER))
    for what, size, limit in limits:
        if size > limit:
            return f"{size} {what}: one launch takes {limit}"
    if inner % 64 or half_k % 32 or value(call.down.global_scale).dim() != 1:
        return f"experts of {inner} x {2 * half_k}: one launch takes multiples of 64"
    return ""


def _routed(moe: Node, norm: RMSNorm) -> tuple[Node, Node | None, Routing] | str:
    """Where the layer ends, what it adds, and how its experts are chosen; or why one launch does not do that."""
    call: Any = MoeCall.of(*moe.args, **moe.kwargs)
    router = _router(call.expert_ids, 1)
    if router is None or _router(call.expert_weights, 0) is not router:
        return "its experts are chosen by something else than fp4.router"
    x, weight, bias, k, form, dtype = router.args
    if below_views(x) is not norm.y:
        return "the router does not read what the experts read"
    if bias is not None:
        return "the router has a bias"
    if {user for y in (norm.y, router) for user in _readers(y)} != {moe, router}:
        return "something else reads the norm or the choice"
    if norm.weight is None or norm.weight.op not in ("placeholder", "get_attr") or len({value(n).dtype for n in (norm.x, norm.weight, norm.y)}) > 1:
        return "the norm has no weight of the dtype of what it reads"
    end, residual = _sum_of(moe)
    if not in_one_mutation_region([*norm.inside, router, moe, end]):
        return "something is written between the norm and the experts"
    return end, residual, Routing(weight, k, form, dtype == value(norm.x).dtype)  # type: ignore[arg-type]


def _router(node: Any, number: int) -> Node | None:
    """The ``fp4.router`` whose result ``number`` a view ``node`` is of."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in _COPIES:
        node = node.args[0]
    if not is_call(node, operator.getitem) or node.args[1] != number or not is_call(node.args[0], fp4.router.default):
        return None
    return node.args[0]


def _readers(node: Node) -> set[Node]:
    """What reads ``node``, one of its results, or a view of them."""
    found: set[Node] = set()
    for user in node.users:
        looks = user.op == "call_function" and (user.target in _COPIES or user.target is operator.getitem)
        found |= _readers(user) if looks else {user}
    return found


def _sum_of(moe: Node) -> tuple[Node, Node | None]:
    """The sum of the experts' result and a residual of its size, and that residual; if nothing else reads the result."""
    end = moe
    while len(end.users) == 1:
        user = next(iter(end.users))
        if user.op == "call_function" and user.target in _SAME and value(user).shape[-1] == value(moe).shape[-1]:
            end = user
            continue
        if is_call(user, aten.add.Tensor) and not user.kwargs and len(user.args) == 2:
            other: Any = next((n for n in user.args if n is not end), None)
            if isinstance(other, Node) and value(other).numel() == value(moe).numel() and value(other).dtype == value(user).dtype == value(moe).dtype:
                return user, other
        break
    return moe, None


def _rewrite(graph: Graph, moe: Node, norm: RMSNorm, routed: tuple[Node, Node | None, Routing], arrivals: chain.Arrivals) -> None:
    call: Any = MoeCall.of(*moe.args, **moe.kwargs)
    end, residual, routing = routed
    gate_up, down = call.gate_up, call.down
    with graph.inserting_before(end):
        products = [
            Product(
                gate_up.qdata, gate_up.scale, gate_up.global_scale, norm_weight=norm.weight, eps=norm.eps, norm_offset=norm.offset,
                act=call.activation.name, glu=True, routing=routing,
            ),
            Product(down.qdata, down.scale, down.global_scale, residual=None if residual is None else chain.as_row(graph, residual)),
        ]  # fmt: skip
        new = chain.launch(graph, chain.as_row(graph, norm.x), products, call.prefill, arrivals, moe.meta, [moe, moe])
        result = item(graph, new, 1)
        shape = list(value(end).shape)
        end.replace_all_uses_with(result if shape == list(value(result).shape) else emit(graph, aten.reshape.default, (result, shape)))
    erase(end)
    matched("mixture")
