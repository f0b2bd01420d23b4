"""Write into a graph: nodes that carry their fake value, and the removal of what nobody reads any more."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .layout import value

# node.meta: what is of the arguments and results of that one call, so that a node which takes its place may not have it. vLLM's graphs have the last one.
OF_ONE_CALL = ("val", "tensor_meta", "eager_input_vals")


def emit(graph: Graph, op: Any, args: tuple, kwargs: dict | None = None, like: Node | None = None) -> Node:
    """Call ``op`` and give it a ``val``, so that later patterns and Inductor see its dtype and shape. ``like``: of an op that takes no tensor, another node."""
    node = graph.call_function(op, args, kwargs)
    fakes = torch.fx.map_arg(args, value)
    example = next((v for v in fakes if isinstance(v, Tensor)), None if like is None else value(like))
    mode = getattr(example, "fake_mode", None)
    if mode is None:
        node.meta["val"] = op(*fakes, **(kwargs or {}))
    else:
        with mode:
            node.meta["val"] = op(*fakes, **(kwargs or {}))
    return node


def item(graph: Graph, node: Node, number: int) -> Node:
    """Result ``number`` of ``node``, a call that has several."""
    found = graph.call_function(operator.getitem, (node, number))
    found.meta["val"] = node.meta["val"][number]
    return found


def erase(node: Node) -> None:
    """Remove ``node`` and whatever above it only it used."""
    stack = [node]
    while stack:
        dead = stack.pop()
        if dead.users or dead.op != "call_function" or dead._erased or dead.is_impure():
            continue
        above = dead.all_input_nodes
        dead.graph.erase_node(dead)
        stack.extend(above)
