"""``aten.topk`` that chooses the experts of an ``fp4.moe``, on CUDA: with all of the router ``fp4.router``, alone ``fp4.topk``, one kernel for two."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..formats.nvfp4 import HIGH_PRECISION
from ..ops.moe_call import MoeCall
from ..ops.topk import MOST_CHOSEN, MOST_SCORES
from . import router, views
from .counters import matched
from .emit import emit
from .layout import is_call, value
from .moe.read import argument

aten, prims = torch.ops.aten, torch.ops.prims
_BETWEEN = views.RESHAPES | views.SAME | {aten.clone.default, aten._to_copy.default, prims.convert_element_type.default}


def replace(graph: Graph) -> None:
    """Rewrite every such call in ``graph``."""
    for moe in graph.find_nodes(op="call_function", target=torch.ops.fp4.moe.default):
        ids: Any = MoeCall.of(*moe.args, **moe.kwargs).expert_ids
        while isinstance(ids, Node) and ids.op == "call_function" and ids.target in _BETWEEN:
            ids = ids.args[0]
        if not is_call(ids, operator.getitem) or ids.args[1] != 1 or not is_call(ids.args[0], aten.topk.default):
            continue
        topk = ids.args[0]
        if _fits(topk) and not router.rewrite(graph, topk):
            _rewrite(graph, topk)


def _fits(topk: Node) -> bool:
    """The choice is one that ``fp4.topk`` makes, and so does ``fp4.router``."""
    scores, k = value(argument(topk, 0, "self")), argument(topk, 1, "k")
    if scores.device.type != "cuda" or scores.dim() != 2 or type(k) is not int or type(scores.shape[1]) is not int:
        return False
    if argument(topk, 2, "dim", -1) not in (-1, 1) or not argument(topk, 3, "largest", True):
        return False
    return scores.shape[1] <= MOST_SCORES and 0 < k <= min(MOST_CHOSEN, scores.shape[1]) and scores.dtype in HIGH_PRECISION


def _rewrite(graph: Graph, topk: Node) -> None:
    with graph.inserting_before(topk):
        new = emit(graph, torch.ops.fp4.topk.default, (argument(topk, 0, "self"), argument(topk, 1, "k")))
    new.meta = {**topk.meta, **new.meta}
    topk.replace_all_uses_with(new)
    graph.erase_node(topk)
    matched("topk")
