"""Grouped matrix products: which expert the rows between two offsets belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .index import Index, Unproven, Value, Var
from .read import Reader, argument, aten, dtype_of, output_of_sort, prims, shape_of

# by name: torch's own, and the one Transformers defines for dtypes which that does not take
GROUPED = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}


def expert_of_row(reader: Reader, product: Node, offsets: Node, experts: sympy.Expr, row: Index) -> Index:
    """The expert that row ``row`` of a grouped product is multiplied by, if the rows are sorted by expert.

    ``offsets`` must be the running count of the experts' ids; the row in front of offset e + 1 then has the id that
    stands there once the ids are sorted.
    """
    ids = _counted(offsets, experts)
    if dtype_of(ids).is_floating_point:
        raise Unproven("a grouped product whose offsets count something else than ids", 1)
    sort = next((s for probe in _probes(reader, ids, product) if (s := _sort_of(reader, reader.index(ids, (probe,)), probe, ids)) is not None), None)
    if sort is None:
        raise Unproven("a grouped product whose offsets do not come from sorted ids", 1)
    return reader.index(sort.args[0], (ix.permuted(sort, row),))  # type: ignore[arg-type]


def _probes(reader: Reader, ids: Node, product: Node) -> Iterator[Index]:
    """Any entry of ``ids``: as one number, and as token and slot if that is what the vector was flattened from."""
    one = Var(shape_of(ids)[0], ("counted", product))
    yield one
    stopped = reader.read(ids, (one,))
    need = reader.stuck.get((stopped.node, stopped.at))
    if need is not None and need.var is one:
        yield ix.join((Var(size, ("counted", product, d)), size) for d, size in enumerate(need.sizes))


def _counted(offsets: Node, experts: sympy.Expr) -> Node:
    """The vector of ids whose running histogram ``offsets`` is."""
    total = _uncast(offsets)
    if not is_call(total, aten.cumsum.default) or argument(total, 1, "dim") not in (0, -1):
        raise Unproven("a grouped product whose offsets are no running count", 1)
    counts: Any = _uncast(total.args[0])
    if is_call(counts, aten.histc.default):
        ids, bins, low, high = (*counts.args, *(100, 0, 0)[len(counts.args) - 1 :])[:4]
        exact = dtype_of(ids) in (torch.float32, torch.float64) or not dtype_of(ids).is_floating_point
        if exact and bins == experts and low == 0 and high == experts - 1:
            return _of_integers(ids)
    if is_call(counts, aten.bincount.default) and argument(counts, 1, "weights") is None and argument(counts, 2, "minlength", 0) == experts:
        return counts.args[0]
    if is_call(counts, aten.sum.dim_IntList) and counts.args[1] in ([0], (0,)) and len(shape_of(counts.args[0])) == 2:
        return _one_hot_of(_uncast(counts.args[0]), experts)
    raise Unproven("a grouped product whose offsets count something else than ids", 1)


def _one_hot_of(matrix: Any, experts: sympy.Expr) -> Node:
    """``ids`` from ``ids[:, None] == arange(E)``."""
    if is_call(matrix, aten.eq.Tensor):
        ids, numbers = matrix.args
        shape = shape_of(ids)
        number = numbers
        while is_call(number, aten.unsqueeze.default) or is_call(number, aten.reshape.default):
            number = number.args[0]
        from_0 = is_call(number, prims.iota.default) and number.kwargs.get("start", 0) == 0 and number.kwargs.get("step", 1) == 1
        if len(shape) == 2 and shape[1] == 1 and is_call(ids, aten.unsqueeze.default) and from_0 and number.args[0] == experts:
            return ids.args[0]
    raise Unproven("a grouped product whose offsets count something else than ids", 1)


def _uncast(node: Any) -> Any:
    """A count before its conversions."""
    while isinstance(node, Node) and is_call(node, prims.convert_element_type.default):
        node = node.args[0]
    return node


def _of_integers(node: Any) -> Any:
    """Ids before conversions to wider integers or to float32."""
    while is_call(node, prims.convert_element_type.default) and not dtype_of(node.args[0]).is_floating_point:
        node = node.args[0]
    return node


def _sort_of(reader: Reader, source: Index, probe: Index, ids: Node) -> Node | None:
    """The sort whose result, or whose input, is read at ``probe`` as ``source``."""
    for node in ids.graph.find_nodes(op="call_function", target=aten.sort.default) + ids.graph.find_nodes(op="call_function", target=aten.sort.stable):
        if len(shape_of(node.args[0])) != 1 or not any(output_of_sort(user, 1) is node for user in node.users):
            continue
        for at in (probe, Value(node, (probe,))):
            if reader.index(node.args[0], (at,)) == source:
                return node
    return None
