"""Several ``fp4.linear`` of one activation by adjacent row slices of one weight -> one ``fp4.linear`` and slices of its result.

    y0 = linear(x, q[0:n], s[0:n], g, b[0:n]);  y1 = linear(x, q[n:m], s[n:m], g, b[n:m])
    ->  y = linear(x, q[0:m], s[0:m], g, b[0:m]);  y0 = y[..., 0:n];  y1 = y[..., n:m]

Read off the graph alone: the slices are of the same node, so nothing about addresses is assumed and nothing is copied.
Rows between two slices (fewer than 16: :class:`fp4_inductor.modules.PackedWeight` aligns its layers) are computed and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region, module_path
from .counters import matched
from .edit import emit, erase
from .layout import value

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
    node: Node
    qdata: _Rows
    scale: Node
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
    args: tuple[Any, ...] = (*node.args, *(None, "auto")[len(node.args) - 4 :])
    x, qdata, scale, global_scale, bias, large_m = args
    if node.kwargs or not all(isinstance(n, Node) for n in (x, qdata, scale, global_scale)):
        return None
    q, s = _rows(qdata), _rows(scale)
    b = _rows(bias) if isinstance(bias, Node) else None
    if q is None or s is None or (s.start, s.stop) != (q.start, q.stop):
        return None
    if bias is not None and (b is None or (b.start, b.stop) != (q.start, q.stop)):
        return None
    base = None if b is None else b.base
    common = (_same(x), q.base, s.base, _same(global_scale), base, large_m)
    return common, _Call(node, q, s.base, base)


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
        gap = call.qdata.start - runs[-1][-1].qdata.stop if runs else -1
        if 0 <= gap < _GAP:
            runs[-1].append(call)
        else:
            runs.append([call])
    return [run for run in runs if len(run) > 1]


def _rewrite(graph: Graph, run: list[_Call]) -> None:
    start, stop = run[0].qdata.start, run[-1].qdata.stop
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min((c.node for c in run), key=place.__getitem__)
    x, global_scale = first.args[0], first.args[3]
    large_m = first.args[5] if len(first.args) > 5 else "auto"

    def rows(base: Node | None) -> Node | None:
        if base is None or (start, stop) == (0, value(base).shape[0]):
            return base
        return emit(graph, aten.slice.Tensor, (base, 0, start, stop))

    with graph.inserting_before(first):
        merged = emit(
            graph, torch.ops.fp4.linear.default, (x, rows(run[0].qdata.base), rows(run[0].scale), global_scale, rows(run[0].bias), large_m)
        )
        merged.meta = {**first.meta, **merged.meta, MEMBERS: [module_path(c.node) for c in run]}
        last = value(merged).dim() - 1
        for call in run:
            part = emit(graph, aten.slice.Tensor, (merged, last, call.qdata.start - start, call.qdata.stop - start))
            part.meta = {**call.node.meta, **part.meta}
            call.node.replace_all_uses_with(part)
    for call in run:
        erase(call.node)
