"""``act(linear) * mul + residual`` -> ``fp4.linear_epilogue``, where a CUDA kernel has such an epilogue and that saves a pointwise kernel.

Inductor fuses what stands behind its own templates, but not behind an operator, which is what a CUDA kernel of csrc/ is in a graph.
Each of the three steps may be missing; operands have the result's shape and dtype. Where there is no such kernel, or where a kernel of
Inductor's reads the result and takes the steps with it (a residual in front of a norm), the graph stays as it is, and explain() says so. Except where
a linear layer or a router with a norm of its own (:mod:`.norm`, :mod:`.norm_router`) reads the result, so that no such kernel can come first, and of many
rows with a residual: their sum is to be one buffer (``lowerings/linear_epilogue.py``), or each norm would add up again what several layers added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region
from .._torch.symbols import likely
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.select import Plan, Refused, plan
from ..ops import norm_linear, norm_router
from ..ranges import range_in_force
from . import views
from .counters import matched
from .emit import emit, erase
from .glu import CASTS, LONGEST, name_of, same_shape
from .layout import is_call, is_ours, rows_of, value
from .pointwise import is_elementwise

aten = torch.ops.aten
VIEWS = views.RESHAPES | views.UNITS | views.SAME | views.TURNS | views.PARTS | views.SPLITS | {aten.squeeze.default, aten.expand.default}
_OPAQUE = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default}
LINEARS = (torch.ops.fp4.linear.default, norm_linear.LINEAR.op)
NORMS = {
    contract.op for contract in (norm_linear.LINEAR, norm_linear.LINEAR_SIBLINGS, norm_linear.LINEAR_GLU, norm_linear.LINEAR_EPILOGUE, norm_router.CONTRACT)
}
MANY_ROWS = 256  # from here on a sum is read from memory sooner than it is added up again
LEFT_APART = "fp4_left_apart"  # node.meta: why what follows a linear layer is not done by its kernel


@dataclass
class _Found:
    """What stands behind a linear layer, up to ``last``."""

    last: Node
    chain: list[Node] = field(default_factory=list)
    mul: Node | None = None
    residual: Node | None = None

    @property
    def only_adds(self) -> bool:
        return self.residual is not None and self.mul is None and not self.chain


def fuse(graph: Graph) -> None:
    """Rewrite every such call in ``graph``."""
    for linear in [node for target in LINEARS for node in graph.find_nodes(op="call_function", target=target)]:
        found = behind(linear)
        if found.last is linear:
            continue
        options = _plan_of(linear)
        if options is None:
            continue
        if not any(row.csrc for row in options.rows):
            linear.meta[LEFT_APART] = tuple(r for r in options.refused if r.kernel.csrc)
            continue
        many = found.only_adds and likely(rows_of(linear), 0, graph, range_in_force()) >= MANY_ROWS
        if _kernel_follows(found.last) and not many and not _norm_follows(found.last):
            linear.meta[LEFT_APART] = tuple(
                Refused(r.implementation, "what stands behind the layer is part of the kernel that reads it") for r in options.rows if r.csrc
            )
            continue
        act = name_of(linear, found.chain) if found.chain else ""
        if act is None:  # nothing behind an unknown function can be had either
            continue
        if in_one_mutation_region([linear, found.last]):
            _rewrite(graph, linear, found, act)


def arguments_of(linear: Node) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of one of :data:`LINEARS`: what it says of its norm (empty: it has none), and the arguments of ``fp4.linear``."""
    norm = linear.args[1 : 1 + norm_linear.LEADING] if linear.target is norm_linear.LINEAR.op else ()
    args = (linear.args[0], *linear.args[1 + len(norm) :])
    return norm, (*args, *(None, "auto", None)[len(args) - 4 :])


def _plan_of(linear: Node) -> Plan | None:
    if linear.kwargs:
        return None
    _, (x, qdata, *_, prefill, rows) = arguments_of(linear)
    x, (n, half_k) = value(x), value(qdata).shape
    if x.device.type != "cuda" or type(n) is not int or type(half_k) is not int or len(rows or ()) > MAX_SCALES:
        return None
    return plan(select.describe("linear_epilogue", x.device, x.dtype, n, half_k * 2, prefill), dispatch_config())


def _kernel_follows(node: Node) -> bool:
    """Does a kernel that Inductor writes read ``node``, or a view of it? It computes ``node`` on the way, at the cost of a load or two."""
    for user in node.users:
        if user.target in VIEWS:
            if _kernel_follows(user):
                return True
        elif user.op != "output" and user.target not in _OPAQUE and not is_ours(user):
            return True
    return False


def _norm_follows(node: Node) -> bool:
    """Does a linear layer, or a router, with a norm of its own read ``node``, or a view of it?"""
    return any(user.target in NORMS or (user.target in VIEWS and _norm_follows(user)) for user in node.users)


def is_written_by_a_linear_layer(node: Node, most: int = 0) -> bool:
    """Would the CUDA kernel of a linear layer write ``node``, the end of what stands behind that layer, if a layer with a norm of its own read it?

    ``most``: the most rows that there can be, if their number is not known.
    """
    above = [node]
    for one in above:  # which grows
        if one.op == "call_function" and one.target in LINEARS:
            found, options, m = behind(one), _plan_of(one), rows_of(one)
            rows = (m,) if type(m) is int and m > 0 else range(1, most + 1)
            ends_here = found.last is node and options is not None and len(rows) > 0 and all(options.pick(m).csrc for m in rows)
            if ends_here and in_one_mutation_region([one, node]) and (not found.chain or name_of(one, found.chain) is not None):
                return True
        elif len(above) < LONGEST and one.op == "call_function" and (one.target in CASTS or is_elementwise(one.target)):
            above += [n for n in one.all_input_nodes if n not in above]
    return False


def behind(linear: Node) -> _Found:
    found = _Found(linear)
    found.chain = _function_of(linear)
    found.last = found.chain[-1] if found.chain else linear
    product = _other(found.last, aten.mul.Tensor)
    if product is not None:
        found.last, found.mul = product
    total = _other(found.last, aten.add.Tensor)
    if total is not None:
        found.last, found.residual = total
    return found


def _function_of(linear: Node) -> list[Node]:
    """The longest run of elementwise operations on ``linear`` alone that ends in one node of its dtype and is read elsewhere only there."""
    inside, run, best = {linear}, list[Node](), 0
    waiting = list(linear.users)
    while waiting and len(run) < LONGEST:
        node = waiting.pop(0)
        if node in inside or node.op != "call_function" or not all(n in inside for n in node.all_input_nodes):
            continue  # if only an operand is missing, that one's turn brings the node back
        if not (node.target in CASTS or is_elementwise(node.target)) or not same_shape(node, linear):
            continue
        inside.add(node)
        run.append(node)
        waiting += node.users
        if value(node).dtype == value(linear).dtype and all(user in inside for n in inside - {node} for user in n.users):
            best = len(run)
    return run[:best]


def _other(node: Node, op: Any) -> tuple[Node, Node] | None:
    """``(result, other operand)`` if ``node`` is read once, by ``op`` with a tensor of its own shape and dtype."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) != 1 or not is_call(user, op) or user.kwargs or len(user.args) != 2:
        return None
    a, b = user.args
    other = b if a is node else a
    if not isinstance(other, Node) or other is node or not same_shape(other, node) or value(other).dtype != value(node).dtype:
        return None
    return (user, other) if value(user).dtype == value(node).dtype and same_shape(user, node) else None


def _rewrite(graph: Graph, linear: Node, found: _Found, act: str) -> None:
    norm, (x, *args, prefill, rows) = arguments_of(linear)
    several = (list(rows),) if rows else ()
    op = torch.ops.fp4.norm_linear_epilogue.default if norm else torch.ops.fp4.linear_epilogue.default
    with graph.inserting_before(found.last):
        new = emit(graph, op, (x, *norm, *args, act, found.mul, found.residual, prefill, *several))
    new.meta = {**found.last.meta, **new.meta}
    if "nn_module_stack" in linear.meta:  # the call is still that of the linear layer, for explain()
        new.meta["nn_module_stack"] = linear.meta["nn_module_stack"]
    found.last.replace_all_uses_with(new)
    erase(found.last)
    matched(op._opname)
