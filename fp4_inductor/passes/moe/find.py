"""Run the proof over a graph: at which nodes a layer may end, and what is reported when none does."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ..._torch.fx import whole_graph
from ..layout import ROOTS, is_call, value
from ..missed import missed
from .gather import gather_first
from .index import Unproven
from .layer import prove
from .read import aten, prims
from .rewrite import rewrite

log = logging.getLogger(__name__)
fp4 = torch.ops.fp4
_REACH = 40
_FAILED = 9  # reported before any ordinary reason
_REASON = "fp4_moe_refused"
# What can be the last operation of a layer: it weights, sums, or rounds.
_LAST = {
    aten.sum.dim_IntList,
    aten.mul.Tensor,
    aten.mm.default,
    aten.bmm.default,
    aten.index_put.default,
    aten.index_add.default,
    aten.add.Tensor,
    prims.convert_element_type.default,
}
_VIEWS = {aten.reshape.default, aten.permute.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int}


def register() -> None:
    """Append the pass to Inductor's post-grad patterns: layers before any other rewrite, the report behind the last one."""
    whole_graph(0, apply)
    whole_graph(2, report)


def apply(graph: Graph) -> None:
    """Rewrite every layer of ``graph``."""
    sources = list(_expert_reads(graph))
    if not sources:
        return
    number = {node: i for i, node in enumerate(graph.nodes)}
    reach = {node: _downstream(node) for node in sources}
    refused: dict[Node, Unproven] = {}
    for root in _ends(set().union(*reach.values()), number):
        if root._erased or not root.users:
            continue
        try:
            rewrite(prove(root))
        except Unproven as reason:
            log.debug("%s is not the result of an MoE layer: %s", root, reason)
            refused[root] = reason
        except Exception as error:  # the user's graph compiles without us
            log.warning("the search for MoE layers failed at %s", root, exc_info=True)
            refused[root] = Unproven(f"the search failed: {error!r}", _FAILED)
    for node in sources:
        if not node._erased:
            reasons = [reason for end, reason in refused.items() if end in reach[node]]
            node.meta[_REASON] = max(reasons, key=lambda r: r.stage).reason if reasons else "nothing downstream of it weights and sums experts"
    for node in sources:
        if not node._erased and node.target in ROOTS:
            gather_first(node)


def report(graph: Graph) -> None:
    """Tell explain() about each weight of several experts that is still dequantised as a whole, and why."""
    for target in ROOTS:
        for node in graph.find_nodes(op="call_function", target=target):
            if value(node).dim() > 2:
                missed(node, value(node), node.meta.get(_REASON, "it came into the graph after the passes"))


def _expert_reads(graph: Graph) -> Iterator[Node]:
    for target in (*ROOTS, fp4.bmm.default, fp4.linear.default, fp4.sparse_linear.default):
        for node in graph.find_nodes(op="call_function", target=target):
            packed = 0 if target in ROOTS else 1
            if len(node.args) < packed + 3:
                continue  # called with keywords
            if value(node.args[packed]).dim() > 2 or is_call(node.args[packed], aten.select.int):
                yield node


def _ends(nodes: set[Node], number: dict[Node, int]) -> list[Node]:
    """Where a layer may end, the most likely first: the last operation that computes something, else a view of such a one."""
    floats = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and value(n).is_floating_point()]
    computed = {n for n in floats if n.target in _LAST}
    views = {n for n in floats if n.target in _VIEWS and _viewed(n) in computed}
    return sorted(computed, key=lambda n: -number[n]) + sorted(views, key=lambda n: number[n])


def _viewed(node: Node) -> Node:
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _downstream(start: Node) -> set[Node]:
    """What is computed from ``start``, as far as a layer can be long."""
    seen = {start}
    front = [start]
    for _ in range(_REACH):
        front = [user for user in dict.fromkeys(u for node in front for u in node.users) if user not in seen and user.op == "call_function"]
        seen.update(front)
    return seen
