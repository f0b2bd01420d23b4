"""Norm and rotation of query and key in front of ``fp4.cached_attention`` -> its prologue, where one launch serves the call.

    query = rope(norm(view(linear(x)))), key likewise, by the same angles;  attention(query, key, ...)
    ->  attention(view(linear(x)), view(linear(x)), ..., q_norm, k_norm, eps, norm_offset, cos, sin, rotary)

Read from the operands upward. Rotations are Hugging Face's: ``x * cos + cat(-x[R/2:], x[:R/2]) * sin``, all of the head or its first R channels, or the two
halves apart with R/2 angles (gpt-oss). Interleaved pairs are another rotation and are left alone. The norm over the head is an RMSNorm, times its weight or
times 1 + its weight (Gemma), or there is none. The graph rounds after each step, the prologue once; Inductor's own kernels round as seldom.

The attention writes its cache, so it stands in the graph as ``auto_functionalized_v2``, with its arguments by name.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .._torch.fx import without_modes
from ..config import dispatch_config
from ..formats.nvfp4 import HIGH_PRECISION
from ..kernels import select
from ..ops.cached_call import OWN, CachedCall, Stored
from .counters import matched
from .emit import emit, erase
from .layout import is_call, same, value
from .missed import BEFORE_ATTENTION, missed

aten, prims = torch.ops.aten, torch.ops.prims
_HEADS_FIRST = [0, 2, 1, 3]


class _Part(NamedTuple):
    """``of[..., begin:end]``."""

    of: Node
    begin: int
    end: int


class _Rope(NamedTuple):
    x: Node
    cos: Node  # [B or 1, Q, C]
    sin: Node
    rotary: int


class _Norm(NamedTuple):
    x: Node
    moved: bool  # x is [B, Q, H, D], and heads come first behind the norm
    weight: Node | None = None
    eps: float = 0.0
    offset: float = 0.0


def fuse(graph: Graph) -> None:
    """Move norm and rotation into every call of ``fp4.cached_attention`` in ``graph`` that one launch serves."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.args and node.args[0] is torch.ops.fp4.cached_attention.default and serves(node):
            reason = _fuse(graph, node)
            if reason:
                missed(node, value(node.kwargs["query"]), reason, BEFORE_ATTENTION)


def serves(node: Node) -> bool:
    """Does the kernel of one launch serve this call, however long the cache is?"""
    given = dict(node.kwargs)
    if any(given.get(name) is not None for name in ("q_norm", "k_norm", "cos", "sin")):
        return False
    query, key = value(given["query"]), value(given["key"])
    if not all(isinstance(size, int) for size in (*query.shape[1:], key.shape[1])) or not key.shape[1]:
        return False
    bases: Any = given["_all_bases"]
    names = (*OWN, *Stored._fields)
    written = {name: bases[i] for name in names if (i := given.get(f"_{name}_base_index")) is not None}
    found = {name: written.get(name, given.get(name)) for name in names}
    call = CachedCall.of(**{name: value(a) if isinstance(a, Node) else a for name, a in found.items()})
    heads, queries, d = query.shape[1:]
    with without_modes():
        form = select.cached_form(call)
        plan = select.plan(select.describe("cached_attention", query.device, query.dtype, heads, d, form=form), dispatch_config())
    return plan.pick(queries * (heads // key.shape[1])).kernel in select.ONE_LAUNCH


def _fuse(graph: Graph, node: Node) -> str:
    """Rewrite; else why not."""
    query, key = node.kwargs["query"], node.kwargs["key"]
    if not isinstance(query, Node) or not isinstance(key, Node) or len(query.users) > 1 or len(key.users) > 1:
        return "another operation reads the query or the key that is attended with"
    ropes = [_rope(operand) for operand in (query, key)]
    if (ropes[0] is None) != (ropes[1] is None):
        return "only one of query and key is rotated in a form that is known"
    if ropes[0] is not None and ropes[0][1:] != ropes[1][1:]:  # type: ignore[index]
        return "query and key are rotated by different angles"
    norms = [_norm(operand if rope is None else rope.x) for operand, rope in zip((query, key), ropes, strict=True)]
    if ropes[0] is None and norms[0].weight is None and norms[1].weight is None:
        return "no norm and no rotation of a known form in front of it"
    numbers = {(norm.eps, norm.offset) for norm in norms if norm.weight is not None}
    if len(numbers) > 1:
        return "the norms of query and key have different constants"
    if any(value(norm.x).dtype != value(operand).dtype for norm, operand in zip(norms, (query, key), strict=True)):
        return "query and key have another dtype before norm and rotation"
    eps, offset = numbers.pop() if numbers else (0.0, 0.0)
    with graph.inserting_before(node):
        raw = [emit(graph, aten.permute.default, (norm.x, _HEADS_FIRST)) if norm.moved else norm.x for norm in norms]
    angles: dict[str, Any] = dict(zip(("cos", "sin", "rotary"), ropes[0][1:], strict=True)) if ropes[0] is not None else {}
    new: dict[str, Any] = dict(query=raw[0], key=raw[1], q_norm=norms[0].weight, k_norm=norms[1].weight, eps=eps, norm_offset=offset, **angles)
    node.kwargs = {**node.kwargs, **new}
    for old in (query, key):
        erase(old)
    matched("rope_attention")
    return ""


def _rope(node: Node) -> _Rope | None:
    """The rotation that ``node [B, H, Q, D]`` is the result of."""
    node = _same_number(node)
    if not is_call(node, aten.cat.default):
        return _turned(node)
    parts: Any = node.args[0]
    if len(parts) != 2 or not _is_last(node, node.args[1] if len(node.args) > 1 else 0):
        return None
    rope = _turned(_same_number(parts[0]))
    if rope is None:
        return _halves(*parts)
    kept, part = _part(_same_number(parts[1])), _part(rope.x)  # some channels turn, the others are kept
    if kept.of is not part.of or (part.begin, part.end, kept.begin, kept.end) != (0, rope.rotary, rope.rotary, value(part.of).shape[-1]):
        return None
    return rope._replace(x=_same_number(part.of))


def _turned(node: Node) -> _Rope | None:
    """``x * cos + cat(-x[R/2:], x[:R/2]) * sin``"""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        straight, crossed = _by_angle(one), _by_angle(other)
        if straight is None or crossed is None or not is_call(crossed[0], aten.cat.default):
            continue
        x, swapped = straight[0], crossed[0]
        parts: Any = swapped.args[0]
        if len(parts) != 2 or not _is_last(swapped, swapped.args[1] if len(swapped.args) > 1 else 0) or not is_call(parts[0], aten.neg.default):
            continue
        second, first, whole = _part(parts[0].args[0]), _part(parts[1]), _part(x)
        middle = (whole.begin + whole.end) // 2
        if first == _Part(whole.of, whole.begin, middle) and second == _Part(whole.of, middle, whole.end):
            return _angles(x, straight[1], crossed[1], whole.end - whole.begin)
    return None


def _halves(left: Node, right: Node) -> _Rope | None:
    """``cat(first * cos - second * sin, second * cos + first * sin)``"""
    left, right = _same_number(left), _same_number(right)
    if not is_call(left, aten.sub.Tensor) or not is_call(right, aten.add.Tensor) or left.kwargs or right.kwargs:
        return None
    kept, taken = (_by_angle(factor) for factor in left.args)
    if kept is None or taken is None:
        return None
    first, second = _part(kept[0]), _part(taken[0])
    for one, other in (right.args, right.args[::-1]):
        straight, crossed = _by_angle(one), _by_angle(other)
        if straight is None or crossed is None or straight[1] is not kept[1] or crossed[1] is not taken[1]:
            continue
        width = value(first.of).shape[-1]
        whole = first == _Part(first.of, 0, width // 2) and second == _Part(first.of, width // 2, width)
        if whole and _part(straight[0]) == second and _part(crossed[0]) == first:
            return _angles(_same_number(first.of), kept[1], taken[1], width)
    return None


def _angles(x: Node, cos: Node, sin: Node, rotary: int) -> _Rope | None:
    """The rotation, if ``cos`` and ``sin`` have the shapes that the operator takes."""
    batch, _, queries, _ = value(x).shape
    for angle in (cos, sin):
        shape = value(angle).shape
        if len(shape) != 3 or not (same(shape[0], 1) or same(shape[0], batch)) or not same(shape[1], queries) or shape[2] not in (rotary, rotary // 2):
            return None
    if rotary % 2 or value(cos).shape[2] != value(sin).shape[2] or value(cos).dtype != value(sin).dtype:
        return None
    return _Rope(x, cos, sin, rotary)


def _by_angle(node: object) -> tuple[Node, Node] | None:
    """``(x, angle)`` of ``x * angle[:, None]``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, angle in (node.args, node.args[::-1]):  # type: ignore[attr-defined]
        if isinstance(x, Node) and is_call(angle, aten.unsqueeze.default) and angle.args[1] in (1, -3) and value(angle).dim() == 4:
            return _same_number(x), angle.args[0]
    return None


def _norm(node: Node) -> _Norm:
    """The RMSNorm over the last dimension that ``node [B, H, Q, D]`` is the result of, or none."""
    inner = _same_number(node)
    moved = is_call(inner, aten.permute.default) and list(inner.args[1]) == _HEADS_FIRST  # type: ignore[arg-type]
    found = _rms(_same_number(inner.args[0] if moved else inner))  # type: ignore[arg-type]
    if found is None:
        return _Norm(node, False)
    x, weight, eps, offset = found
    # Of a conversion to float32 what is below: the prologue widens by itself.
    return _Norm(_same_number(x), moved, weight, eps, offset)


def _rms(node: Node) -> tuple[Node, Node, float, float] | None:
    """``(x, weight [D], eps, offset)`` of ``x * rsqrt(mean(x^2) + eps) * (offset + weight)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for factor, scaled in (node.args, node.args[::-1]):
        if not isinstance(factor, Node) or not isinstance(scaled, Node) or value(factor).dim() != 1:
            continue
        weight, offset = _same_number(factor), 0.0
        if is_call(weight, aten.add.Tensor) and isinstance(weight.args[1], (int, float)) and not weight.kwargs:
            weight, offset = _same_number(weight.args[0]), float(weight.args[1])  # type: ignore[arg-type]
        product = _same_number(scaled)
        if not is_call(product, aten.mul.Tensor):
            continue
        for x, root in (product.args, product.args[::-1]):
            eps = _eps(x, root)
            if eps is not None:
                return x, weight, eps, offset  # type: ignore[return-value]
    return None


def _eps(x: object, root: object) -> float | None:
    """eps, if ``root`` is ``rsqrt(mean(x^2, -1) + eps)``."""
    added: Any = root.args[0] if is_call(root, aten.rsqrt.default) else None  # type: ignore[attr-defined]
    if not is_call(added, aten.add.Tensor) or added.kwargs or not isinstance(added.args[1], (int, float)) or not is_call(added.args[0], aten.mean.dim):
        return None
    mean = added.args[0]
    square = mean.args[0]
    if len(mean.args) < 3 or mean.args[2] is not True or len(mean.args[1]) != 1 or not _is_last(square, mean.args[1][0]):
        return None
    squared = (is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2) or (is_call(square, aten.mul.Tensor) and square.args[1] is square.args[0])
    eps = float(added.args[1])
    return eps if squared and square.args[0] is x and math.isfinite(eps) else None


def _same_number(node: Node) -> Node:
    """``node`` without conversions between floating dtypes: the prologue computes in float32 and rounds once."""
    while is_call(node, prims.convert_element_type.default) and {value(node).dtype, value(node.args[0]).dtype} <= set(HIGH_PRECISION):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _part(node: Node) -> _Part:
    """Which channels of which node ``node`` is."""
    node = _same_number(node)
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        split: Any = node.args[0]
        x, size, dim = (*split.args, 0)[:3]
        if isinstance(size, int) and _is_last(x, dim):
            below, begin = _part(x), size * node.args[1]  # type: ignore[operator]
            return _Part(below.of, below.begin + begin, below.begin + begin + value(node).shape[-1])
    if is_call(node, aten.slice.Tensor):
        args: Any = node.args
        x, dim, start, _, step = (*args, *(None, 0, None, None, 1)[len(args) :])
        if _is_last(x, dim) and step == 1 and (start is None or isinstance(start, int)):
            width = value(x).shape[-1]
            below, begin = _part(x), slice(start, None).indices(width)[0]
            return _Part(below.of, below.begin + begin, below.begin + begin + value(node).shape[-1])
    return _Part(node, 0, value(node).shape[-1])


def _is_last(x: Node, dim: int) -> bool:
    return dim in (-1, value(x).dim() - 1)
