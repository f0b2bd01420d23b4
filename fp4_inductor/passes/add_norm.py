"""``norm(x + residual)`` whose sum the graph has in no tensor of its dtype -> a sum, which a linear layer's kernel can add, and the norm of that sum.

Two spellings, both vLLM's:

    y, s = add_norm(x, residual, weight, eps)                      one operator (:mod:`.operators`)
    s32 = x.float() + residual.float();  y = norm(s32);  s = s32.to(x.dtype)

The sum is rounded ahead of the norm then, as vLLM's own CUDA kernel does it. It is taken out only where the layers that read ``y`` can compute the norm.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import rms_norm
from .emit import OF_ONE_CALL, emit, erase
from .glu import CASTS, same_shape
from .layout import is_call, value
from .operators import ADD_NORMS, name_of
from .rms_norm import RMSNorm, exact

aten, prims = torch.ops.aten, torch.ops.prims


class AddNorm(NamedTuple):
    """``y`` is the norm of ``x + residual``. ``norm``: the part of the graph that is computed from a float32 sum; None: one operator computes it all."""

    y: Node
    x: Node
    residual: Node
    norm: RMSNorm | None


def read(y: Node) -> AddNorm | None:
    """``y`` as such a norm; None if it is not one."""
    if is_call(y, operator.getitem):
        call: Any = y.args[0]
        if y.args[1] != 0 or name_of(call.target) not in ADD_NORMS or not _is_plain(call):
            return None
        x, residual = call.args[:2]
        return AddNorm(y, x, residual, None) if _alike(x, residual, y) else None
    norm = rms_norm.read(y)
    if norm is None or not is_call(norm.x, aten.add.Tensor) or norm.x.kwargs or value(norm.x).dtype != torch.float32 or value(y).dtype == torch.float32:
        return None
    x, residual = (exact(a) if isinstance(a, Node) else None for a in norm.x.args)
    if not _alike(x, residual, y) or any(user not in norm.inside and not _rounds(user, y) for user in norm.x.users):
        return None
    return AddNorm(y, x, residual, norm)  # type: ignore[arg-type]


def take_out(graph: Graph, found: AddNorm) -> Node:
    """Rewrite it. Returns the node that is ``found.y`` now."""
    y, x, residual, norm = found
    if norm is None:
        call: Any = y.args[0]
        with graph.inserting_before(call):
            total = _emit(graph, aten.add.Tensor, (x, residual), call)
            new = _emit(graph, _alone(call), (total, *call.args[2:]), call)
        for item in list(call.users):
            item.replace_all_uses_with(total if item.args[1] else new)
            erase(item)
        return new
    s32: Any = norm.x
    with graph.inserting_after(s32):
        total = _emit(graph, aten.add.Tensor, (x, residual), s32)
    with graph.inserting_after(total):
        as_before = _emit(graph, prims.convert_element_type.default, (total, torch.float32), s32)
    for user in list(s32.users):
        if _rounds(user, y):
            user.replace_all_uses_with(total)
            erase(user)
        else:
            user.replace_input_with(s32, as_before)
    erase(s32)
    return y


def _is_plain(call: Node) -> bool:
    """Is nothing but the sum and its norm read, and are all arguments behind eps None?"""
    return not call.kwargs and len(call.args) >= 4 and all(a is None for a in call.args[4:]) and all(is_call(user, operator.getitem) for user in call.users)


def _alone(call: Node) -> Any:
    namespace, _, name = ADD_NORMS[name_of(call.target)].partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _alike(x: Any, residual: Any, y: Node) -> bool:
    """Do both have the shape and the dtype of ``y``?"""
    both = [node for node in (x, residual) if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)]
    return len(both) == 2 and all(same_shape(node, y) and value(node).dtype == value(y).dtype for node in both)


def _rounds(user: Node, y: Node) -> bool:
    """Is ``user`` the sum in the dtype of ``y``?"""
    return user.op == "call_function" and user.target in CASTS and value(user).dtype == value(y).dtype


def _emit(graph: Graph, op: Any, args: tuple, of: Node) -> Node:
    node = emit(graph, op, args)
    node.meta = {**{name: part for name, part in of.meta.items() if name not in OF_ONE_CALL}, **node.meta}
    return node
