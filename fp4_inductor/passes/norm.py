"""``linear(norm(x))`` -> ``fp4.norm_linear``: an RMSNorm becomes part of the linear layers that read it, if their kernel computes it and a launch is saved.

A decode step has two norms a layer, each a kernel that moves a few kilobytes. A kernel of one row reads that row anyway. Of 2 to 32 rows a norm may be divided
among the layers around it (:mod:`.rms_halves`), which is asked first. Else the norm is left where it is if

* the kernel that serves this M takes no norm, or M is not known: only static shapes are folded;
* something other than a linear layer reads it (a router, a result of the graph): its kernel would stay;
* a kernel of Inductor's makes its input (an embedding, a norm behind attention as in Gemma 2, a sum behind experts): that one computes the norm, too.

``explain()`` names the norms that a kernel could take and did not. It runs before :mod:`.epilogue`: a residual that was part of the norm's kernel is
one of the linear layer in front of it from then on.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.kernel import Span
from ..kernels.select import Plan, plan
from ..ops.linear_siblings import begins
from ..ops.norm_linear import with_norm
from . import add_norm, epilogue, rank_sums, rms_halves
from .add_norm import AddNorm
from .counters import matched
from .emit import emit, erase
from .layout import OF_ROWS, below_views, is_call, is_ours, linear_arguments, rows_of, same, value
from .missed import APART, missed
from .rms_norm import RMSNorm, read

aten, fp4 = torch.ops.aten, torch.ops.fp4
LINEARS = (fp4.linear.default, fp4.linear_siblings.default, fp4.linear_glu.default)
BY_INDUCTOR = "the kernel that makes its input computes it on the way"
# Operators of torch's that are not computed by a kernel that Inductor writes.
_IN_MEMORY = {aten.mm.default, aten.addmm.default, aten.bmm.default}


class _Reader(NamedTuple):
    """A linear layer that reads a norm, the plan for it, and the kernel that would serve it."""

    linear: Node
    options: Plan
    row: Span | None


def fold(graph: Graph) -> None:
    """Rewrite every such norm in ``graph``."""
    seen: set[Node] = set()
    for linear in [node for node in graph.nodes if node.op == "call_function" and node.target in LINEARS]:
        if linear._erased:  # another one read the same norm
            continue
        y = below_views(linear.args[0])
        if y in seen:
            continue
        total = add_norm.read(y)
        norm = read(y) if total is None else None
        seen.add(y)
        if norm is None and total is None:
            continue
        readers, others = _readers(y)
        if not others and rms_halves.serve(graph, readers):
            reason = _why_not_divided(graph, y, total, norm, readers)
            if reason:
                missed(y, value(y), reason, APART)
            continue
        asked = [_Reader(node, options, _row(options, node)) for node in readers if (options := _plan_of(node)) is not None]
        if not any(_takes_norm(row) for reader in asked for row in reader.options.rows):
            continue  # there is no kernel that could
        if total is not None:
            reason = _why_not_taken_out(total, asked, others)
            if reason:
                missed(y, value(y), reason, APART)
                continue
            y = add_norm.take_out(graph, total)
            norm = read(y)
            seen.add(y)
        reason = _why_not(norm, asked, others)
        if reason:
            missed(y, value(y), reason, APART)
            continue
        for reader in asked:
            _rewrite(graph, norm, reader.linear)


def _why_not_divided(graph: Graph, y: Node, total: AddNorm | None, norm: RMSNorm | None, readers: list[Node]) -> str:
    """Why the norm ``y`` is not divided among the layer in front of it and ``readers``; empty: now it is."""
    if total is not None:
        reason = rms_halves.why_not_in_front(graph, total)
        if reason:
            return reason
        norm = read(add_norm.take_out(graph, total))
    reason = "" if norm is None else why_not_alone(norm)
    reason = reason or rms_halves.why_not(graph, norm, readers)
    if not reason:
        rms_halves.divide(graph, norm, readers)  # type: ignore[arg-type]
    return reason


def _why_not_taken_out(total: AddNorm, readers: list[_Reader], others: list[str]) -> str:
    """Why a sum stays a part of its norm; empty: its layer's kernel, or a launch that sums over ranks, can add, and ``readers`` can compute the norm."""
    reason = _why_not_others(others) or _why_not_rows(readers)
    if not reason and not any(below_views(node).target in epilogue.LINEARS or rank_sums.in_a_launch(node) for node in (total.x, total.residual)):
        return BY_INDUCTOR
    return reason


def _why_not(norm: RMSNorm | None, readers: list[_Reader], others: list[str]) -> str:
    """Why ``norm`` is not a part of its readers; empty: it can be."""
    if norm is None:
        return "its weight is not one number for each column"
    if others:
        return _why_not_others(others)
    reason = why_not_alone(norm) or _why_not_rows(readers)
    if reason:
        return reason
    if not in_one_mutation_region([*norm.inside, *(reader.linear for reader in readers)]):
        return "something is written between it and a linear layer"
    if not is_in_memory(norm.x):
        return BY_INDUCTOR
    return ""


def why_not_alone(norm: RMSNorm) -> str:
    """Why no kernel computes ``norm``, or a half of it, whoever reads it; empty: one may."""
    if norm.weight is None:
        return "it has no weight"
    if norm.weight.op not in ("placeholder", "get_attr"):
        return "its weight is computed by the graph"
    dtypes = [value(node).dtype for node in (norm.x, norm.weight, norm.y)]
    if len(set(dtypes)) > 1:
        x, weight, y = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it reads {x}, multiplies by {weight} and gives {y}: kernels take one dtype"
    if any(user not in norm.inside for node in norm.inside - {norm.y} for user in node.users):
        return "something else reads a part of it"
    return ""


def _why_not_others(others: list[str]) -> str:
    return f"{others[0]} reads it, too" if others else ""


def _why_not_rows(readers: list[_Reader]) -> str:
    """Why the kernels of ``readers`` compute no norm; empty: all of them do."""
    for reader in readers:
        m = rows_of(reader.linear.args[0])
        if reader.row is None or not _takes_norm(reader.row):
            taking = next((row for row in reader.options.rows if _takes_norm(row)), None)
            most = f"{taking.kernel} takes one, up to M = {taking.max_m}" if taking else f"no kernel takes one in front of {reader.linear}"
            return f"M is {m if type(m) is int else 'dynamic'}: {most}"
    return ""


def _readers(y: Node) -> tuple[list[Node], list[str]]:
    """The linear layers that read ``y``, or a view of its rows, as their activation; and what else reads it."""
    linears, others = [], []
    for user in y.users:
        if user.op == "call_function" and user.target in OF_ROWS and same(value(user).shape[-1], value(y).shape[-1]):
            more = _readers(user)
            linears += more[0]
            others += more[1]
        elif user.op == "call_function" and user.target in LINEARS and user.args[0] is y and y not in user.args[1:] and not user.kwargs:
            linears.append(user)
        else:
            others.append("the graph's caller" if user.op == "output" else str(user.target))
    return linears, others


def _plan_of(linear: Node) -> Plan | None:
    """Of a call of one of :data:`LINEARS`; None if no CUDA kernel serves it in one launch."""
    x, qdata, _, global_scale, *rest = linear.args
    (n, half_k), x = value(qdata).shape, value(x)
    if type(n) is not int or type(half_k) is not int or n == 0 or half_k == 0:
        return None
    op = "linear_glu" if linear.target is fp4.linear_glu.default else "linear"
    prefill, scales = rest[2] if len(rest) > 2 else "auto", 1
    if linear.target is fp4.linear.default:
        *_, prefill, rows = linear_arguments(linear)
        scales = len(rows or ()) or 1
    elif linear.target is fp4.linear_siblings.default and value(global_scale).dim():
        scales = len(begins(rest[1]) or ()) or MAX_SCALES + 1
    if scales > MAX_SCALES:
        return None  # several launches
    return plan(select.describe(op, x.device, x.dtype, n, half_k * 2, prefill, counts=select.Counts(scales=scales)), dispatch_config())


def _row(options: Plan, linear: Node) -> Span | None:
    """The kernel that serves the rows of ``linear``; None if their number is not known."""
    m = rows_of(linear.args[0])
    row = options.pick(m) if type(m) is int and m > 0 else None
    return None if row is None or (row.one_scale and options.call.scales > 1) else row


def _takes_norm(row: Span) -> bool:
    return row.library is not None and row.library.norm


def is_in_memory(x: Node, most: int = 0) -> bool:
    """Is ``x`` written by something other than a kernel that Inductor writes? Such a kernel would compute the norm, too.

    A sum behind a linear layer is, if that layer's kernel adds: ``epilogue.fuse`` then leaves it no other. So is a sum over ranks inside a launch.
    ``most``: as of ``epilogue.is_written_by_a_linear_layer``.
    """
    if rank_sums.in_a_launch(x):
        return True
    while x.op == "call_function" and x.target in epilogue.VIEWS:
        x = x.args[0]  # type: ignore[assignment]
    if x.op in ("placeholder", "get_attr") or x.target in _IN_MEMORY or (is_call(x, operator.getitem) and is_ours(x.args[0])):
        return True
    return getattr(x.target, "namespace", "aten") not in ("aten", "prims") or epilogue.is_written_by_a_linear_layer(x, most)


def _rewrite(graph: Graph, norm: RMSNorm, linear: Node) -> None:
    op = with_norm(linear.target)
    with graph.inserting_before(linear):
        x: Any = linear.args[0]
        x = norm.x if x is norm.y else emit(graph, aten.reshape.default, (norm.x, list(value(x).shape)))
        new = emit(graph, op, (x, norm.weight, norm.eps, norm.offset, *linear.args[1:]))
    new.meta = {**linear.meta, **new.meta}
    linear.replace_all_uses_with(new)
    erase(linear)
    matched(op._opname)
