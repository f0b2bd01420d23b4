"""``dequantize(keys), dequantize(values) -> scaled_dot_product_attention`` of a decode step -> ``fp4.decode_attention`` over the codes.

    sdpa(q, repeat_kv(codes_k * scale_k), repeat_kv(codes_v * scale_v), mask)  ->  decode_attention(q, codes_k, codes_v, mask, scale, scale_k, scale_v)

For caches in int8 and float8_e4m3fn of other libraries and of the user's own code. How the codes become numbers is not matched by its spelling: the graph
between the codes and the attention is evaluated at positions (:mod:`.pointwise`) and has to give code times scale, for every code, with every element read
from where it belongs. The scale may be one for all, for each head, for each token, or for each head and token; without one it is a number of the graph.

The attention stands in the graph as one of the operators that torch makes of ``F.scaled_dot_product_attention``. If torch computes it in several operators
(the "math" backend), there is nothing to find. A form that is not served is noted with the reason.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region, without_modes
from ..config import dispatch_config
from ..kernels import select
from ..ops.decode_attention import CODES
from .counters import matched
from .emit import emit, erase
from .layout import is_call, same, value
from .missed import DEQUANTIZED_CACHE, missed
from .pointwise import Evaluator, Leaf, NotPointwise, Position, sizes, understood

aten = torch.ops.aten
KERNEL = "triton_codes_attention"
_HEADS_FIRST = [0, 2, 1, 3]
_SAMPLES = 1 << 14
_MOST_NODES = 200
_ENDS = ("mm.", "matmul", "dot_product", "convolution", "embedding", "fp4.", "auto_functionalized")  # the keys are not those numbers any more
# What writes some elements of a tensor, for the reason that is given.
_PARTLY = {aten.index_put.default, aten.cat.default, aten.slice_scatter.default, aten.index_copy.default, aten.scatter.src, aten.select_scatter.default}


class _Attention(NamedTuple):
    query: Node
    key: Node
    value: Node
    mask: Node | None
    dropout: float
    causal: bool
    scale: float | None


@dataclass(frozen=True)
class _Codes:
    """``operand[b, h, s, d] == codes[..] * scale[..]``.

    Args:
        codes: 4-dimensional. ``axes``: for each of b, h, s, d the dimension of ``codes`` that it runs along.
        scale: a node and for each of its dimensions the number of the axis (0 b, 1 h, 2 s) that it runs along, or None of a dimension of size 1; or a number.
        path: the nodes between.
    """

    codes: Node
    axes: tuple[int, ...]
    scale: tuple[Node, tuple[int | None, ...]] | float
    path: tuple[Node, ...]


class _Refused(Exception):  # noqa: N818  (a verdict about a graph, never shown to the user)
    """Why an operand is not served."""


def fuse(graph: Graph) -> None:
    """Rewrite every attention of ``graph`` over a cache in 8 bits that the kernel serves; note the others."""
    for target, read in _FORMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            attention = read(*node.args, **node.kwargs)
            if not any(_reads_codes(x) for x in (attention.key, attention.value)):
                continue
            try:
                with without_modes(), torch.no_grad():
                    _fuse(graph, node, attention)
            except (_Refused, NotPointwise) as reason:
                missed(node, value(attention.key), str(reason), DEQUANTIZED_CACHE)


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _Attention(query, key, value, None, dropout_p, is_causal, scale)


def _efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return _Attention(query, key, value, attn_bias, dropout_p, is_causal, scale)


def _cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _Attention(query, key, value, attn_bias, dropout_p, is_causal, scale)


def _of_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


_FORMS = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _of_cpu,
}


def _fuse(graph: Graph, node: Node, a: _Attention) -> None:
    outputs = [user for user in node.users if user.users]
    if not all(is_call(user, operator.getitem) and user.args[1] == 0 for user in outputs):
        raise _Refused("more than the result of the attention is read, as in training")
    if a.dropout:
        raise _Refused("dropout")
    key, val = _decoded(a.key, a.query), _decoded(a.value, a.query)
    if a.causal and not same(value(a.key).shape[2], 1):
        raise _Refused("is_causal=True compares positions from the first key on, which is no decode step; pass a mask, or none for one query")
    reason = why_not(a, value(key.codes).shape[key.axes[1]])
    if reason:
        raise _Refused(reason)
    if not in_one_mutation_region([node, *key.path, *val.path]):
        raise _Refused("something is written between the dequantization and the attention")
    with graph.inserting_before(node):
        codes = [emit(graph, aten.permute.default, (c.codes, list(c.axes))) if c.axes != (0, 1, 2, 3) else c.codes for c in (key, val)]
        scales = [_scale(graph, c) for c in (key, val)]
        new = emit(graph, torch.ops.fp4.decode_attention.default, (a.query, *codes, _mask(graph, a.mask), a.scale, *scales))
        out = emit(graph, aten.permute.default, (new, _HEADS_FIRST))
    for user in outputs:
        user.replace_all_uses_with(out)
    for user in list(node.users):
        graph.erase_node(user)
    above = node.all_input_nodes
    graph.erase_node(node)  # which erase() takes for impure: it could have had dropout
    for dense in above:
        erase(dense)
    matched("quantized_cache")


def why_not(a: _Attention, kv_heads: int) -> str:
    """Why the kernel over codes does not serve this attention; empty: it does."""
    query = value(a.query)
    heads, queries, d = query.shape[1:]
    if not isinstance(queries, int) or not isinstance(d, int):
        return "the number of queries is not known while the graph is compiled"
    m = queries * (heads // kv_heads)
    with without_modes():
        call = select.describe("decode_attention", query.device, query.dtype, heads, d, form=select.attention_form(d, codes=True))
        plan = select.plan(call, dispatch_config())
    if plan.pick(m).kernel == KERNEL:
        return ""
    if any(span.kernel == KERNEL for span in plan.rows):
        return f"{m} queries of a KV head, more than {max(plan.bounds)}"
    return next(f"{KERNEL}: {refused.reason}" for refused in plan.refused if refused.kernel.name == KERNEL)


def _mask(graph: Graph, mask: Node | None) -> Node | None:
    """With four dimensions, and not expanded: each row would have one of its own."""
    while mask is not None and is_call(mask, aten.expand.default) and value(mask.args[0]).dim() == value(mask).dim():
        mask = mask.args[0]  # type: ignore[assignment]
    if mask is not None and value(mask).dim() < 4:
        mask = emit(graph, aten.reshape.default, (mask, [1] * (4 - value(mask).dim()) + list(value(mask).shape)))
    return mask


def _scale(graph: Graph, c: _Codes) -> Node:
    """Four dimensions, the last of size 1."""
    if isinstance(c.scale, float):
        options = {"dtype": torch.float32, "device": value(c.codes).device, "pin_memory": False}
        return emit(graph, aten.full.default, ([1, 1, 1, 1], c.scale), options, like=c.codes)
    node, axes = c.scale
    there = sorted((axis, dim) for dim, axis in enumerate(axes) if axis is not None)
    order = [dim for _, dim in there] + [dim for dim, axis in enumerate(axes) if axis is None]
    if order != list(range(len(order))):
        node = emit(graph, aten.permute.default, (node, order))
    found = dict(there)
    shape = [value(c.scale[0]).shape[found[axis]] if axis in found else 1 for axis in range(4)]
    return node if list(value(node).shape) == shape else emit(graph, aten.reshape.default, (node, shape))


# --- what an operand is made of ---------------------------------------------------------------------------------------


def _reads_codes(operand: Node) -> bool:
    """Is ``operand`` made of a tensor of 8-bit codes, so that something is lost if it is not recognised? What :data:`_ENDS` names is not looked through."""
    seen, stack = {operand}, [operand]
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if _is_codes(node) and value(node).dim() >= 3:
            return True
        if node.op == "call_function" and not any(name in str(node.target) for name in _ENDS):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            stack.extend(new)
    return False


def _is_codes(node: Node) -> bool:
    x = node.meta.get("val")
    return isinstance(x, Tensor) and x.dtype in CODES


def _decoded(operand: Node, query: Node) -> _Codes:
    """What ``operand [B, H, S, D]`` is made of, or :class:`_Refused`."""
    dtype = value(operand).dtype
    if dtype != value(query).dtype or value(operand).dim() != 4:
        raise _Refused(f"query and keys or values are {value(query).dtype} and {dtype}")
    if not all(isinstance(size, int) for size in value(operand).shape):
        raise _Refused("sizes of the cache are not known while the graph is compiled")
    codes, others, path = _leaves(operand)
    partly = [node for node in others if node.target in _PARTLY and _reads_codes(node)]
    if partly:
        raise _Refused(f"tokens that are not in 8 bits are written into the dequantized cache ({partly[0].name})")
    if not codes:
        between = next((node for node in others if _reads_codes(node)), None)
        raise _Refused("only one of keys and values is in 8 bits" if between is None else f"{between.target} between the codes and the attention")
    if len(codes) > 1:
        smaller = min(codes, key=lambda node: value(node).numel())
        raise _Refused(f"{smaller.name} besides the codes, as a zero point: the kernel takes scales alone")
    if len(others) > 1:
        raise _Refused(f"codes with more than one scale, or a zero point: {', '.join(node.name for node in others)}")
    if value(codes[0]).dim() != 4:
        raise _Refused(f"codes of {value(codes[0]).dim()} dimensions, not 4")
    return _proven(operand, codes[0], others[0] if others else None, tuple(path))


def _leaves(operand: Node) -> tuple[list[Node], list[Node], list[Node]]:
    """(nodes in 8 bits, other nodes at which evaluation ends, the nodes between)."""
    codes: list[Node] = []
    others: list[Node] = []
    path: list[Node] = []
    seen, stack = {operand}, [operand]
    while stack:
        node = stack.pop()
        if _is_codes(node):
            codes.append(node)
        elif not understood(node) or node.target in _PARTLY:
            others.append(node)
        else:
            path.append(node)
            stack += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
        if len(seen) > _MOST_NODES:
            raise _Refused(f"more than {_MOST_NODES} operations between the codes and the attention")
    return codes, others, path


class _Recorded:
    """A leaf that gives each sample its value, and keeps where it was read."""

    def __init__(self, values: Tensor):
        self.values = values
        self.at: tuple[Tensor, ...] | None = None

    def __call__(self, at: Position) -> Tensor:
        at = tuple(p.expand(self.values.shape) for p in at)
        if self.at is not None and not all(map(torch.equal, self.at, at)):
            raise _Refused("codes or scales are read at several positions for one number")
        self.at = at
        return self.values

    def restricted(self, rows: Tensor) -> Leaf:
        raise NotPointwise("parts put together are not followed")


def _proven(operand: Node, codes: Node, scale: Node | None, path: tuple[Node, ...]) -> _Codes:
    shape, dtype = sizes(operand), value(operand).dtype
    if 0 in shape:
        raise _Refused("an empty cache")
    generator = torch.Generator().manual_seed(0)
    position = tuple(torch.randint(0, size, (_SAMPLES,), generator=generator) for size in shape)
    for axis, size in enumerate(shape):  # every index of an axis, but of the longest ones
        position[axis][: min(size, _SAMPLES)] = torch.arange(min(size, _SAMPLES))
    byte = torch.arange(_SAMPLES).to(torch.uint8)
    if value(codes).dtype == torch.float8_e4m3fn:
        byte = torch.where(byte & 0x7F == 0x7F, 0, byte)  # NaN
    numbers = byte.view(value(codes).dtype)
    exponent = torch.randint(-3, 3, (_SAMPLES,), generator=generator)
    factors = [torch.ones(_SAMPLES)] if scale is None else [2.0**exponent, torch.full((_SAMPLES,), 1.0 / 3.0)]
    constant = 1.0
    for factor in factors:
        leaves: dict[Node, Any] = {codes: _Recorded(numbers)}
        if scale is not None:
            factor = factor.to(value(scale).dtype)
            leaves[scale] = _Recorded(factor if value(scale).dim() else factor[:1].reshape(()))
            if not value(scale).dim():
                factor = factor[:1]
        try:
            got = Evaluator(leaves)(operand, position)
        except (RuntimeError, TypeError) as e:  # an operation that has no CPU implementation for its dtypes
            raise _Refused(f"the decoding cannot be evaluated: {e}") from e
        want = numbers.double() * factor.double()
        if scale is None:
            constant = float((got.double() * want).sum() / want.square().sum())  # of rounded numbers, whose errors average out
            want = want * constant
        wide = max(torch.finfo(t).eps for t in (dtype, got.dtype) if t.is_floating_point)
        if got.dtype != dtype or not bool(((got.double() - want).abs() <= 2 * wide * want.abs()).all()):
            raise _Refused(f"the numbers are not code times scale{'' if scale is None else f' ({scale.name})'}")
    axes = _axes(leaves[codes].at, sizes(codes), position, shape)
    return _Codes(codes, axes, constant if scale is None else (scale, _scale_axes(leaves[scale].at, sizes(scale), position, sizes(codes), axes, shape)), path)


def _axes(at: Position, have: tuple[int, ...], position: Position, shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each axis of an operand of ``shape`` the dimension of the codes that it runs along; one KV head serves a group of neighbouring heads."""
    for order in sorted(itertools.permutations(range(4)), key=lambda order: order != (0, 1, 2, 3)):
        sized = [have[dim] for dim in order]
        if sized[0] != shape[0] or sized[2:] != list(shape[2:]) or shape[1] % sized[1]:
            continue
        group = shape[1] // sized[1]
        wanted = (position[0], position[1] // group, position[2], position[3])
        if all(torch.equal(at[dim], want) for dim, want in zip(order, wanted, strict=True)):
            return order
    raise _Refused("heads, tokens or channels of the codes are in another order than those of the keys")


def _scale_axes(
    at: Position, have: tuple[int, ...], position: Position, codes: tuple[int, ...], axes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int | None, ...]:  # fmt: skip
    kv_heads = codes[axes[1]]
    wanted = (position[0], position[1] // (shape[1] // kv_heads), position[2])
    found: list[int | None] = []
    for dim, size in enumerate(have):
        if size == 1:
            found.append(None)
            continue
        axis = next((i for i, want in enumerate(wanted) if i not in found and torch.equal(at[dim], want)), None)
        if axis is None:
            raise _Refused("a scale for each channel, or for groups of them: the kernel takes scales of heads and tokens")
        found.append(axis)
    return tuple(found)
