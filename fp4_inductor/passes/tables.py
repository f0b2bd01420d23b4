"""A library's E2M1 look-up table becomes a constant of the graph, so that the proof in ``idiom.py`` can read it."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._torch.fx_tables import before_autograd, guard_unchanged, module_level_tensors, run_before_cache_lookup
from ..formats import e2m1


def register() -> None:
    run_before_cache_lookup()
    before_autograd(specialise)


def specialise(graph: Graph) -> None:
    """Replace each module-level tensor that holds the E2M1 values by its values, under a guard that it stays so."""
    for node, table, source in list(module_level_tensors(graph)):
        if not _only_read(node) or not _is_e2m1(table) or not guard_unchanged(source, table):
            continue
        with graph.inserting_after(next(n for n in reversed(graph.find_nodes(op="placeholder")))):
            constant = graph.call_function(torch.tensor, (table.tolist(),), {"dtype": table.dtype, "device": table.device})
        constant.meta.update({k: v for k, v in node.meta.items() if k in ("example_value", "stack_trace")})
        node.replace_all_uses_with(constant)


def _only_read(table: Node) -> bool:
    """Used for look-ups alone, directly or moved to a device: graphs are not functional yet, so anything else may write."""

    def looked_up(node: Node) -> bool:
        return bool(node.users) and all(user.target is operator.getitem and user.args[0] is node for user in node.users)

    def moved(node: Node) -> bool:
        return node.op == "call_method" and node.target == "to" and looked_up(node)

    return looked_up(table) or (bool(table.users) and all(map(moved, table.users)))


def _is_e2m1(table: Tensor) -> bool:
    if not table.is_floating_point() or table.requires_grad or table.dim() != 1 or table.dtype.itemsize < 2:
        return False
    return table.tolist() in (list(e2m1.MAGNITUDES), list(e2m1.VALUES))
