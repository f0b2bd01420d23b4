"""What is known of a size while a graph is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols, statically_known_true
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["guarded", "interval", "is_within", "likely", "only_size", "size_of_graph", "statically_known_true"]

Bounds = tuple[Any, Any]  # (least, largest), both included; the largest None: no limit


def likely(size: int | torch.SymInt, fallback: int, graph: Graph | None = None, given: Bounds | None = None) -> int:
    """A likely value of ``size``, ``fallback`` where none is known; no guard. It is one that ``given``, the range of ``graph``'s only dynamic size, allows."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = int(size.node.hint) if size.node.has_hint() else fallback
    m = size.node.expr
    if graph is None or given is None or m.free_symbols != {size_of_graph(graph)}:
        return hint
    low, high = interval(m, dict.fromkeys(m.free_symbols, given))
    return int(min(max(hint, low), high))


def is_within(size: int | torch.SymInt, bounds: tuple[int, int], graph: Graph, given: Bounds | None, guards: bool) -> bool:
    """Is ``size`` within ``bounds``, both included, whenever ``graph`` is called?

    Known by ``given``, the range of the graph's only dynamic size, or by what torch knows and Dynamo checks. ``guards``: else, if the example lies within, a
    guard may make it so, where Dynamo checks guards and the user has promised no range that it would narrow.
    """
    from . import guards as checks  # imports Dynamo

    low, high = bounds
    if not isinstance(size, torch.SymInt):
        return low <= size <= high
    m, shape_env = size.node.expr, size.node.shape_env
    if given is not None and m.free_symbols == {size_of_graph(graph)}:
        least, most = interval(m, dict.fromkeys(m.free_symbols, given))
        return bool(least >= low and most <= high)
    promised = checks.promised(shape_env)
    if checks.why_unchecked(shape_env):
        known = {s: promised.get(s) or (0, None) for s in m.free_symbols}
        least, most = interval(m, known)
        return bool(least >= low and most <= high)
    if statically_known_true(size >= low) and statically_known_true(size <= high):
        return True
    if not guards or checks.why_no_more(shape_env) or not promised.keys().isdisjoint(m.free_symbols) or not low <= likely(size, 0) <= high:
        return False
    guarded(shape_env).add(m)
    return bool(size <= high) and bool(size >= low)


def guarded(shape_env: ShapeEnv) -> set[sympy.Expr]:
    """The sizes on which :func:`is_within` has put a guard."""
    return shape_env.__dict__.setdefault("fp4_guarded", set())


def only_size(values: Iterable[Any]) -> sympy.Symbol | None:
    """The symbol, if there is exactly one in sizes, strides and numbers of ``values``: tensors, SymInts, expressions."""
    found: set[sympy.Symbol] = set()
    for value in values:
        if isinstance(value, (torch.Tensor, torch.SymInt, sympy.Expr)):
            found |= free_symbols(value)
    return found.pop() if len(found) == 1 else None


def size_of_graph(graph: Graph) -> sympy.Symbol | None:
    """:func:`only_size` of an FX graph's inputs."""
    return only_size(node.meta.get("val") for node in graph.find_nodes(op="placeholder"))


def interval(m: sympy.Expr, ranges: Mapping[sympy.Symbol, Bounds]) -> tuple[Any, Any]:
    """``(least, largest)`` value of ``m``, whose symbols all have ranges; an end may be infinite."""
    known = {s: ValueRanges(sympy.Integer(low), int_oo if high is None else sympy.sympify(high)) for s, (low, high) in ranges.items()}
    found = bound_sympy(m, known)
    return found.lower, found.upper
