"""``fp4.router(norm(x))`` -> ``fp4.norm_router``: the RMSNorm in front of a mixture of experts becomes part of the launch that chooses experts.

Whoever else reads the norm (the experts, shared experts) reads what that launch writes. The norm is left where it is if

* the kernel that takes a norm does not serve so many tokens, or their number is not known to be in its range;
* a kernel of Inductor's makes the norm's input: that one computes the norm, too.

``explain()`` names the norms that the kernel could take and did not. It runs before :mod:`.norm`, and :mod:`.epilogue`: a residual that was part of the norm's
kernel is one of the linear layer in front of it from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import symbols
from .._torch.fx import in_one_mutation_region
from ..config import dispatch_config
from ..kernels import select
from ..ranges import range_in_force
from . import norm
from .counters import matched
from .emit import emit, erase, item
from .layout import below_views, value
from .missed import APART, missed
from .rms_norm import RMSNorm, read

aten, fp4 = torch.ops.aten, torch.ops.fp4


def fuse(graph: Graph) -> None:
    """Rewrite every such norm in ``graph``."""
    for router in graph.find_nodes(op="call_function", target=fp4.router.default):
        found = read(below_views(router.args[0]))
        served = _served(router) if found is not None else None
        if found is None or served is None:
            continue
        reason = _why_not(found, router, *served)
        if reason:
            missed(found.y, value(found.y), reason, APART)
        else:
            _rewrite(graph, found, router)


def _served(router: Node) -> tuple[int, Any] | None:
    """The fewest tokens of the kernel that takes a norm, and its span, which has an end; None: there is none."""
    x, weight = (value(node) for node in router.args[:2])  # type: ignore[arg-type]
    options = select.plan(select.describe("router", x.device, x.dtype, weight.shape[0], weight.shape[1]), dispatch_config())
    least = 1
    for row in options.rows:
        if row.library is not None:
            return least, row
        least = (row.max_m or 0) + 1
    return None


def _why_not(found: RMSNorm, router: Node, least: int, row: Any) -> str:
    """Why a norm is no part of ``router``; empty: it can be. The others: of :func:`_served`."""
    if reason := norm.why_not_alone(found):
        return reason
    if any(isinstance(node, Node) and node.op not in ("placeholder", "get_attr") for node in router.args[1:3]):
        return "the router's weight is computed by the graph"
    if not in_one_mutation_region([*found.inside, router]):
        return "something is written between it and the router"
    if not norm.is_in_memory(found.x, row.max_m):
        return norm.BY_INDUCTOR
    tokens = value(router.args[0]).shape[0]
    # Last, for it may add a guard.
    if symbols.is_within(tokens, (least, row.max_m), router.graph, range_in_force(), dispatch_config().unproven == "guard"):
        return ""
    return f"{tokens if type(tokens) is int else 'a dynamic number of'} tokens: {row.kernel} takes a norm of {least} to {row.max_m}, known at compile time"


def _rewrite(graph: Graph, found: RMSNorm, router: Node) -> None:
    """The op stands where the norm did: what else reads the norm may stand ahead of the router."""
    y = found.y
    x, *rest = router.args
    rows, shape = list(value(x).shape), list(value(y).shape)

    def at(node: Any) -> Any:  # an attribute may be read behind the norm
        return graph.node_copy(node) if isinstance(node, Node) and node.op == "get_attr" else node

    with graph.inserting_before(y):
        given = found.x if list(value(found.x).shape) == rows else emit(graph, aten.reshape.default, (found.x, rows))
        new = emit(graph, fp4.norm_router.default, (given, at(found.weight), found.eps, found.offset, *map(at, rest)))
        h, *choice = (item(graph, new, i) for i in range(3))
        if shape != rows:
            h = emit(graph, aten.reshape.default, (h, shape))
    new.meta = {**router.meta, **new.meta}
    for user in list(router.users):
        user.replace_all_uses_with(choice[user.args[1]])  # type: ignore[index]
        erase(user)
    erase(router)
    y.replace_all_uses_with(h)
    erase(y)
    matched("norm_router")
