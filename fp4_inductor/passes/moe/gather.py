"""Where the whole layer is not recognised: dequantise the chosen experts, not all of them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..counters import matched
from ..emit import emit, erase
from ..layout import is_call
from .read import aten, prims, shape_of

_KEEP_EXPERTS_FIRST = {aten.clone.default, aten.alias.default, aten.detach.default, prims.convert_element_type.default}


def gather_first(dense: Node) -> None:
    """``f(dequantize(w))[ids] -> f(dequantize(w[ids]))`` where every reader of ``dense`` takes some experts of it."""
    chains: list[list[Node]] = []
    todo = [[user] for user in dense.users]
    while todo:
        chain = todo.pop()
        last = chain[-1]
        if _takes_experts(last):
            chains.append(chain)
        elif _keeps_experts(last) and last.users:
            todo += [[*chain, user] for user in last.users]
        else:
            return
    graph = dense.graph
    for chain in chains:
        *between, gather = chain
        with graph.inserting_before(gather):
            *parts, dtype = dense.args
            parts = [emit(graph, gather.target, (part, *gather.args[1:]), dict(gather.kwargs)) for part in parts]
            node = emit(graph, dense.target, (*parts, dtype))
            lead = len(shape_of(parts[-1])) - 1  # the global scale has one entry per matrix
            for step in between:
                args = (node, [*range(lead), *(d % 3 + lead for d in step.args[1])]) if step.target is aten.permute.default else (node, *step.args[1:])
                node = emit(graph, step.target, args, dict(step.kwargs))
        node.meta.update({k: v for k, v in dense.meta.items() if k.startswith("fp4_")})
        gather.replace_all_uses_with(node)
        erase(gather)
        matched("moe_gather")


def _takes_experts(node: Node) -> bool:
    if is_call(node, aten.index.Tensor):
        indices: Any = node.args[1]
        return len(indices) == 1 and indices[0] is not None
    takes = is_call(node, aten.index_select.default) or is_call(node, aten.select.int)
    return takes and node.args[1:2] == (0,)


def _keeps_experts(node: Node) -> bool:
    if is_call(node, aten.permute.default):
        return [d % 3 for d in node.args[1]] == [0, 2, 1]  # type: ignore[union-attr]
    return node.op == "call_function" and node.target in _KEEP_EXPERTS_FIRST
