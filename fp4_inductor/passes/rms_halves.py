"""``linear(norm(linear(x) + residual))`` of 2 to 32 rows -> ``fp4.linear_residual_squares`` and ``fp4.rms_scaled_linear``: the norm's launch vanishes.

cuda_gemv computes a norm that stands in front of it, for its one row (:mod:`.norm`, which asks here first). With more rows every block would compute it anew.
But the root mean square of a row is a factor of all sums behind it, so the norm can be divided: the layer in front, whose kernel adds the residual, writes the
row times the norm's weight and sums of its squares; the layers behind multiply their sums by a factor of the row.

A norm is left where it is if M is not known to be in the range of the kernels, if the layers in front of it and behind it are not all cuda_table's, if the sum
in front of it is not that of one linear layer and a tensor, or if something besides linear layers reads it. ``explain()`` gives the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .._torch import symbols
from .._torch.fx import in_one_mutation_region
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.kernel import Span
from ..kernels.select import Plan
from ..ops import linear_siblings, rms_linear
from ..ranges import range_in_force
from . import epilogue
from .add_norm import AddNorm
from .counters import matched
from .emit import emit, erase, item
from .layout import below_views, is_call, linear_arguments, rows_of, value
from .rms_norm import RMSNorm

aten, fp4 = torch.ops.aten, torch.ops.fp4
NO_LAYER = "its input is not the sum of a linear layer and a tensor: nothing but such a layer's kernel can write what the layers behind it need"
OVERFLOWS = "float16 may not hold a row times its weight: bfloat16 does"
REGROUPED = "M is dynamic, and a linear layer reads its rows in another shape"


class _Sum(NamedTuple):
    """A linear layer whose result is added to ``residual``; ``total`` is the sum."""

    linear: Node
    total: Node
    residual: Node


def serve(graph: Graph, readers: list[Node]) -> bool:
    """Do kernels that take squares serve all of ``readers``, calls of linear layers, at every M that there can be?"""
    plans = [plan_of(reader) for reader in readers]
    return bool(plans) and all(options is not None and _library(graph, options, reader) is not None for options, reader in zip(plans, readers, strict=True))


def plan_of(linear: Node) -> Plan | None:
    """Of a linear layer behind a norm, for the op that takes the norm's squares; None if it is served by several launches."""
    x, qdata, _, global_scale, *rest = linear.args
    (n, half_k), x = value(qdata).shape, value(x)
    prefill: Any
    if linear.target is fp4.linear_glu.default:
        op, prefill, scales = "rms_scaled_linear_glu", rest[2] if len(rest) > 2 else "auto", 1
    elif linear.target is fp4.linear_siblings.default:
        op, prefill = "rms_scaled_linear", rest[2] if len(rest) > 2 else "auto"
        scales = len(linear_siblings.begins(rest[1]) or ()) or MAX_SCALES + 1 if value(global_scale).dim() else 1  # type: ignore[arg-type]
    else:
        *_, prefill, rows = linear_arguments(linear)
        op, scales = "rms_scaled_linear", len(rows or ()) or 1
    return _plan(op, x, n, half_k, prefill, scales)


def _plan(op: str, x: torch.Tensor, n: Any, half_k: Any, prefill: str, scales: int) -> Plan | None:
    if type(n) is not int or type(half_k) is not int or n == 0 or half_k == 0 or scales > MAX_SCALES:
        return None
    return select.plan(select.describe(op, x.device, x.dtype, n, half_k * 2, prefill, counts=select.Counts(scales=scales)), dispatch_config())


# The op whose kernel each of these takes the place of.
_WHOLE = {"linear_residual_squares": "linear_epilogue", "rms_scaled_linear": "linear", "rms_scaled_linear_glu": "linear_glu"}


def _library(graph: Graph, options: Plan, linear: Node) -> Span | None:
    """The span with a library that serves every M of ``linear``, as it would without a norm; None: there is none, or M is not known to lie in it."""
    low = 1
    for row in options.rows:
        if row.library is not None and row.library.half and row.max_m is not None:
            m, guards = rows_of(linear.args[0]), dispatch_config().unproven == "guard"
            if not symbols.is_within(m, (low, row.max_m), graph, range_in_force(), guards):
                return None
            whole = select.plan(replace(options.call, op=_WHOLE[options.call.op]), dispatch_config())
            served = [whole.pick(rows).library for rows in ((m,) if type(m) is int else (low, row.max_m))]
            return row if all(library is not None and library.source == row.library.source for library in served) else None
        low = (row.max_m or 0) + 1
    return None


def why_not(graph: Graph, norm: RMSNorm | None, readers: list[Node]) -> str:
    """Why ``norm``, of a known M, is not divided among the layer in front of it and ``readers``; empty: it can be. Others than these do not read it."""
    if norm is None:
        return "its weight is not one number for each column"
    found = _sum_of(norm)
    if found is None:
        return NO_LAYER
    reason = _why_not_by(graph, found.linear)
    if reason:
        return reason
    if not in_one_mutation_region([found.linear, found.total, *norm.inside, *readers]):
        return "something is written between it and a linear layer"
    if any(_shape_of(reader, found) is None for reader in readers):
        return REGROUPED
    return ""


def why_not_in_front(graph: Graph, total: AddNorm) -> str:
    """Why no layer in front of ``total``, a sum that is a part of its norm, can write squares, as far as is known before the sum is taken out."""
    reasons = [
        _why_not_by(graph, node)
        for node in (total.x, total.residual)
        if is_call(node, fp4.linear.default) and not node.kwargs and len(node.users) == 1  # by the sum, or a cast of the product for it
    ]
    return "" if "" in reasons else reasons[0] if reasons else NO_LAYER


def _why_not_by(graph: Graph, linear: Node) -> str:
    """Why the kernel of ``linear`` cannot add a residual and write squares; empty: it can."""
    x, qdata, _, _, _, prefill, rows = linear_arguments(linear)
    if value(x).dtype == torch.float16:
        return OVERFLOWS
    n, half_k = value(qdata).shape
    options = _plan("linear_residual_squares", value(x), n, half_k, prefill, len(rows or ()) or 1)
    if options is not None and _library(graph, options, linear) is not None:
        return ""
    refused = next((r.reason for r in (() if options is None else options.refused) if r.kernel.csrc), "no kernel writes its squares")
    return f"{refused}: the layer in front of it, N = {n}, K = {half_k * 2}"


def _sum_of(norm: RMSNorm) -> _Sum | None:
    """What ``norm`` reads, or reads a view of, as the sum of a linear layer and a tensor."""
    total = below_views(norm.x)
    if not is_call(total, aten.add.Tensor):
        return None
    for linear in total.all_input_nodes:
        if is_call(linear, fp4.linear.default) and not linear.kwargs:
            found = epilogue.behind(linear)
            if found.last is total and found.only_adds:
                return _Sum(linear, total, found.residual)  # type: ignore[arg-type]
    return None


def _shape_of(reader: Node, found: _Sum) -> list[int] | None:
    """The leading sizes of the activation of ``reader``, -1 for one that is dynamic; empty: they are those of what is summed. None: several are."""
    lead = list(value(reader.args[0]).shape[:-1])
    if lead == list(value(found.total).shape[:-1]):
        return []
    sizes = [size if type(size) is int else -1 for size in lead]
    return sizes if sizes.count(-1) < 2 else None


def divide(graph: Graph, norm: RMSNorm, readers: list[Node]) -> None:
    """Rewrite ``norm``, of which :func:`why_not` says nothing."""
    found: Any = _sum_of(norm)
    x, qdata, scale, global_scale, bias, prefill, rows = linear_arguments(found.linear)
    shapes = [_shape_of(reader, found) for reader in readers]
    several = (list(rows),) if rows else ()
    with graph.inserting_before(found.total):
        weight: Any = graph.node_copy(norm.weight) if norm.weight.op == "get_attr" else norm.weight  # type: ignore[union-attr]  # which may stand behind the sum
        call = emit(graph, rms_linear.SQUARES.op, (x, qdata, scale, global_scale, bias, found.residual, weight, norm.offset, prefill, *several))
        y, z, squares = (item(graph, call, i) for i in range(3))
    call.meta = {**found.total.meta, **call.meta}
    if "nn_module_stack" in found.linear.meta:  # the call is still that of the linear layer, for explain()
        call.meta["nn_module_stack"] = found.linear.meta["nn_module_stack"]
    found.total.replace_all_uses_with(y)
    erase(found.total)
    matched("linear_residual_squares")
    for reader, shape in zip(readers, shapes, strict=True):
        op = rms_linear.behind_squares(reader.target)
        with graph.inserting_before(reader):
            given = [emit(graph, aten.reshape.default, (t, [*shape, value(t).shape[-1]])) if shape else t for t in (z, squares)]
            new = emit(graph, op, (*given, norm.eps, *reader.args[1:]))
        new.meta = {**reader.meta, **new.meta}
        reader.replace_all_uses_with(new)
        erase(reader)
        matched(op._opname)
