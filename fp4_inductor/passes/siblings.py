"""Several ``fp4.linear`` of one activation by adjacent row slices of one weight -> one ``fp4.linear_siblings``.

    y0 = linear(x, q[0:n], s[0:n], g[0], b[0:n]);  y1 = linear(x, q[n:m], s[n:m], g[1], b[n:m])
    ->  y0, y1 = linear_siblings(x, q[0:m], s[0:m], g[0:2], b[0:m], [0, n, n, m])

Read off the graph alone: the slices are of the same node, so nothing about addresses is assumed and nothing is copied.
Rows between two slices (fewer than 16: :class:`fp4_inductor.modules.SiblingWeight` aligns its layers) are padding.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region, module_path
from .counters import matched
from .emit import emit, erase
from .layout import is_call, linear_arguments, value

aten, prims = torch.ops.aten, torch.ops.prims
MEMBERS = "fp4_members"  # node.meta: module paths of the calls that were merged
_GAP = 16
# Pure operations that two calls may each have applied to one tensor.
_SAME_IF_SAME_ARGUMENTS = {
    aten.select.int,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.reshape.default,
    aten.view.default,
    prims.convert_element_type.default,
}


@dataclass(frozen=True)
class _Rows:
    """``base[start:stop]`` along dimension 0."""

    base: Node
    start: int
    stop: int


@dataclass(frozen=True)
class _Call:
    """One ``fp4.linear``; ``index``: its global scale is that element of ``global_scale``; None: is ``global_scale``."""

    node: Node
    qdata: _Rows
    scale: Node
    global_scale: Node
    index: int | None
    bias: Node | None


def merge(graph: Graph) -> None:
    """Merge every set of such calls in ``graph``."""
    sets: dict[tuple, list[_Call]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.fp4.linear.default):
        found = _call(node)
        if found is not None:
            sets.setdefault(found[0], []).append(found[1])
    for calls in sets.values():
        for run in _runs(calls):
            if in_one_mutation_region([c.node for c in run]):
                _rewrite(graph, run)
                matched("siblings")


def _call(node: Node) -> tuple[tuple, _Call] | None:
    """``(what calls must have in common, the call)``; None if the weight is no row slice."""
    x, qdata, scale, global_scale, bias, prefill, members = linear_arguments(node)
    if members:
        return None  # several layers already
    if node.kwargs or not all(isinstance(n, Node) for n in (x, qdata, scale, global_scale)):
        return None
    q, s = _rows(qdata), _rows(scale)
    b = _rows(bias) if isinstance(bias, Node) else None
    if q is None or s is None or (s.start, s.stop) != (q.start, q.stop):
        return None
    if bias is not None and (b is None or (b.start, b.stop) != (q.start, q.stop)):
        return None
    base = None if b is None else b.base
    common = (_same(x), q.base, s.base, base, prefill)
    picked = is_call(global_scale, aten.select.int) and value(global_scale.args[0]).dim() == 1 and type(global_scale.args[2]) is int
    g, index = (global_scale.args[0], global_scale.args[2]) if picked else (global_scale, None)
    return common, _Call(node, q, s.base, g, index, base)


def _rows(node: Node) -> _Rows | None:
    if node.target is not aten.slice.Tensor or node.op != "call_function":
        return None
    args: Any = node.args
    base, dim, start, stop, step = (*args, *(None, 0, None, None, 1)[len(args) :])
    count = value(base).shape[0]
    numbers = (dim, start or 0, count if stop is None else stop, step, count)
    if not all(type(n) is int for n in numbers) or dim != 0 or step != 1:
        return None
    first, last, _ = slice(start, stop).indices(count)
    return _Rows(base, first, last) if first < last else None


def _same(arg: Any) -> Any:
    """Equal for nodes that hold the same value."""
    if isinstance(arg, (list, tuple)):
        return tuple(map(_same, arg))
    if isinstance(arg, Node) and arg.op == "call_function" and arg.target in _SAME_IF_SAME_ARGUMENTS:
        return (arg.target, *map(_same, arg.args), *sorted((k, _same(v)) for k, v in arg.kwargs.items()))
    return arg


def _runs(calls: list[_Call]) -> list[list[_Call]]:
    """Adjacent calls, in the order of their rows."""
    runs: list[list[_Call]] = []
    for call in sorted(calls, key=lambda c: (c.qdata.start, c.qdata.stop)):
        if runs and _continues(runs[-1], call):
            runs[-1].append(call)
        else:
            runs.append([call])
    return [run for run in runs if len(run) > 1]


def _continues(run: list[_Call], call: _Call) -> bool:
    """Do the rows and the global scales of ``call`` follow on those of ``run``?"""
    last = run[-1]
    if not 0 <= call.qdata.start - last.qdata.stop < _GAP or call.global_scale is not last.global_scale:
        return False
    if call.index is None or last.index is None:
        return call.index == last.index
    step = call.index - last.index  # 0: they share one scale, 1: each has its own
    return step in (0, 1) and (len(run) == 1 or step == last.index - run[-2].index)  # type: ignore[operator]


def _rewrite(graph: Graph, run: list[_Call]) -> None:
    start, stop = run[0].qdata.start, run[-1].qdata.stop
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min((c.node for c in run), key=place.__getitem__)
    prefill = first.args[5] if len(first.args) > 5 else "auto"
    spans = [bound - start for c in run for bound in (c.qdata.start, c.qdata.stop)]

    def rows(base: Node | None, start: int = start, stop: int = stop) -> Node | None:
        if base is None or (start, stop) == (0, value(base).shape[0]):
            return base
        return emit(graph, aten.slice.Tensor, (base, 0, start, stop))

    with graph.inserting_before(first):
        g: Any = first.args[3]
        if run[0].index is not None and run[0].index != run[1].index:
            g = rows(run[0].global_scale, run[0].index, run[0].index + len(run))
        arguments = (first.args[0], rows(run[0].qdata.base), rows(run[0].scale), g, rows(run[0].bias), spans, prefill)
        merged = emit(graph, torch.ops.fp4.linear_siblings.default, arguments)
        merged.meta = {**first.meta, **merged.meta, MEMBERS: [module_path(c.node) for c in run]}
        for i, call in enumerate(run):
            part = graph.call_function(operator.getitem, (merged, i))
            part.meta = {**call.node.meta, "val": merged.meta["val"][i]}
            call.node.replace_all_uses_with(part)
    for call in run:
        erase(call.node)
