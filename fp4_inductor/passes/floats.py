"""Activation parameters under ``dynamic=True``.

There a module's Python floats (gpt-oss' ``alpha`` and ``limit``) become graph inputs, so that no pass could tell which
activation they make. In a graph with expert weights they are made constants again, under a guard, as they are without
``dynamic=True``.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node, map_arg

from .._torch.fx_tables import attribute_floats, before_autograd, guard_equal
from ..tensors.base import FP4Tensor

_EXPERT_RANK = 3


def register() -> None:
    before_autograd(specialise)


def specialise(graph: Graph) -> None:
    """Replace the floats that are attributes of modules by their values, if the graph reads expert weights."""
    if not any(map(_holds_experts, graph.nodes)):
        return
    for node, value, source in list(attribute_floats(graph)):
        items = list(node.users)
        if not all(item.op == "call_method" and item.target == "item" for item in items) or not guard_equal(source, value):
            continue
        for item in items:
            for user in list(item.users):
                user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n, item=item, value=value: value if n is item else n)  # type: ignore[assignment]
            graph.erase_node(item)


def _holds_experts(node: Node) -> bool:
    if node.op == "placeholder":
        example = node.meta.get("example_value")
        return isinstance(example, FP4Tensor) and example.dim() >= _EXPERT_RANK
    if node.op != "call_function" or "fp4." not in str(node.target) or not node.args:
        return False
    examples = (n.meta.get("example_value") for n in node.all_input_nodes)
    return any(isinstance(e, torch.Tensor) and e.dtype == torch.uint8 and e.dim() >= _EXPERT_RANK for e in examples)
