"""Evaluate a graph at chosen output positions, without ever building its tensors.

A weight's dequantisation is a chain of views, copies, table look-ups and elementwise operations. At one position of its
result such a chain reads a few leaf elements; which ones, and what it makes of them, can be asked for thousands of
positions at once at the cost of a few vector operations, whatever the size of the weight. Operations outside that
class raise :class:`NotPointwise`.

Everything here works on *positions*: a tuple with one int64 vector ``[S]`` per dimension of the tensor asked for.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx import Node

from .._torch.fx import constant_of
from . import views

aten, prims = torch.ops.aten, torch.ops.prims
Position = tuple[Tensor, ...]


class Leaf(Protocol):
    """What stands at the end of a chain: answers with its values at the positions it is read at."""

    def __call__(self, at: Position) -> Tensor: ...

    def restricted(self, rows: Tensor) -> Leaf:
        """The same leaf for the samples ``rows`` only."""
        ...


_MAX_TABLE = 4096
_MIN_SAMPLES = 64


class NotPointwise(Exception):  # noqa: N818  (a verdict about a graph, never shown to the user)
    """The graph holds something whose value at one position is not a function of a few leaf elements."""


_MOVES = (
    views.RESHAPES
    | views.UNITS
    | views.SAME
    | views.TURNS
    | views.PARTS
    | {
        aten.squeeze.default,
        aten.expand.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
        prims.device_put.default,
    }
)
_FILLS = {aten.full.default, aten.scalar_tensor.default, aten.full_like.default}
_TABLES = {aten.index.Tensor, aten.embedding.default, aten.index_select.default}
_CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.view.dtype}
# pointwise, but not tagged so in every supported torch
_UNTAGGED = {aten.__rshift__.Scalar, aten.__rshift__.Tensor, aten.__lshift__.Scalar, aten.__lshift__.Tensor, aten.where.self}


def is_elementwise(op: Any) -> bool:
    """A pure function of the elements at one position (after broadcasting)."""
    if op in _UNTAGGED:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


def understood(node: Node) -> bool:
    """Whether the evaluator can look through ``node``."""
    if node.op == "get_attr":
        table = constant_of(node)
        return table is not None and table.numel() <= _MAX_TABLE
    if node.op != "call_function":
        return False
    op = node.target
    return op in _MOVES or op in _FILLS or op in _TABLES or op in _CASTS or op in (aten.cat.default, aten.index_put.default) or is_elementwise(op)


def sizes(node: Node) -> tuple[int, ...]:
    """The static shape of ``node``; NotPointwise if it has a symbolic one or none."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(s, int) for s in value.shape):
        raise NotPointwise(f"{node} has no static shape")
    return tuple(value.shape)


class Evaluator:
    """Values of nodes at positions, given what the leaves answer.

    Args:
        leaves: the nodes at which evaluation ends.
    """

    def __init__(self, leaves: dict[Node, Leaf]):
        self.leaves = leaves
        self._known: dict[tuple, tuple[Position, Tensor]] = {}

    def __call__(self, node: Node, at: Position) -> Tensor:
        """``[S]`` values of ``node`` at ``at``."""
        key = (node, *map(id, at))
        if key not in self._known:
            # the positions are kept with the value, so that their ids stay theirs
            self._known[key] = (at, _with_rank_of(node, self._value(node, at)))
        return self._known[key][1]

    def _value(self, node: Node, at: Position) -> Tensor:
        if node in self.leaves:
            return self.leaves[node](at)
        if not understood(node):
            raise NotPointwise(f"{node}: {node.target}")
        if node.op == "get_attr":
            table = constant_of(node)
            if table is None:
                raise NotPointwise(f"{node} is not a constant")
            return table.cpu()[at] if at else table.cpu()
        op: Any = node.target
        if op in _MOVES:
            source = _node(node.args[0])
            return self(source, _moved(node, source, at))
        if op in _FILLS:
            return _fill(node)
        if op in _TABLES:
            return self._looked_up(node, at)
        if op is aten.cat.default:
            return self._concatenated(node, at)
        if op is aten.index_put.default:
            return self._masked(node, at)
        return self._elementwise(node, at)

    def _elementwise(self, node: Node, at: Position) -> Tensor:
        if node.target in _CASTS:
            source, dtype = _node(node.args[0]), node.meta["val"].dtype
            if node.target is not aten.view.dtype:
                return self._operand(source, at).to(dtype)
            if source.meta["val"].dtype.itemsize != dtype.itemsize:
                raise NotPointwise(f"{node} changes the element size")
            return self._operand(source, at).contiguous().view(dtype)
        args = [self._operand(a, at) for a in node.args]
        kwargs = {k: self._operand(v, at) for k, v in node.kwargs.items()}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _operand(self, arg: Any, at: Position) -> Any:
        if not isinstance(arg, Node):
            if isinstance(arg, (list, tuple)):
                raise NotPointwise("an elementwise operation with a list operand")
            return arg
        shape = sizes(arg)
        tail = at[len(at) - len(shape) :] if shape else ()
        if any(s == 1 for s in shape):
            tail = tuple(torch.zeros_like(p) if s == 1 else p for s, p in zip(shape, tail, strict=True))
        return self(arg, tail)

    def _looked_up(self, node: Node, at: Position) -> Tensor:
        """``table[idx]`` along dimension 0, for the three spellings of it."""
        if node.target is aten.index_select.default:
            table_node, dim, index = node.args
            if dim != 0:
                raise NotPointwise(f"{node}: index_select on dimension {dim}")
        elif node.target is aten.embedding.default:
            table_node, index = node.args[:2]
        else:
            table_node, indices = node.args
            if len(indices) != 1:  # type: ignore[arg-type]
                raise NotPointwise(f"{node}: more than one index")
            index = indices[0]  # type: ignore[index]
        index, table_node = _node(index), _node(table_node)
        split = len(sizes(index))
        rows = self(index, at[:split])
        if rows.dtype in (torch.bool, torch.uint8):
            raise NotPointwise(f"{node}: a mask, not an index")
        count = sizes(table_node)[0]
        if bool(((rows < -count) | (rows >= count)).any()):
            raise NotPointwise(f"{node}: reads outside its table")
        return self(table_node, (rows.long() % count, *at[split:]))

    def _concatenated(self, node: Node, at: Position) -> Tensor:
        parts: Any = node.args[0]
        dim = _int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(at)
        at = tuple(torch.broadcast_tensors(*at))
        out, start = None, 0
        for part in parts:
            extent = sizes(part)[dim]
            here = (at[dim] >= start) & (at[dim] < start + extent)
            rows = here.nonzero().flatten()
            if rows.numel() < _MIN_SAMPLES:
                raise NotPointwise(f"{node}: {part} is too small a part to be judged by samples")
            value = Evaluator(_restricted(self.leaves, rows))(part, tuple((p - start if d == dim else p)[rows] for d, p in enumerate(at)))
            if out is None:
                out = torch.empty(at[dim].shape, dtype=node.meta["val"].dtype)
            out[rows] = value.to(out.dtype)
            start += extent
        if out is None:
            raise NotPointwise(f"{node}: empty")
        return out

    def _masked(self, node: Node, at: Position) -> Tensor:
        """``x[mask] = value`` in its functional form."""
        source, indices, value = cast("tuple[Any, Any, Any]", node.args[:3])
        accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
        mask = indices[0] if len(indices) == 1 else None
        plain = isinstance(mask, Node) and isinstance(value, Node) and not accumulate
        if not plain or mask.meta["val"].dtype != torch.bool or sizes(mask) != sizes(node) or sizes(value) not in ((), (1,)):
            raise NotPointwise(f"{node}: not a masked fill")
        return torch.where(self(mask, at), self._operand(value, at), self(source, at))


def _with_rank_of(node: Node, value: Tensor) -> Tensor:
    """0-dim for a 0-dim node and one vector for any other: type promotion tells them apart."""
    if not sizes(node):
        return value.flatten()[0] if value.dim() else value
    return value if value.dim() else value.reshape(1)


def _restricted(leaves: dict[Node, Leaf], rows: Tensor) -> dict[Node, Leaf]:
    return {node: leaf.restricted(rows) for node, leaf in leaves.items()}


def _node(arg: Any) -> Node:
    if not isinstance(arg, Node):
        raise NotPointwise(f"expected a tensor, found {arg!r}")
    return arg


def _int(arg: Any) -> int:
    if not isinstance(arg, int):
        raise NotPointwise(f"expected a static integer, found {arg!r}")
    return arg


def _fill(node: Node) -> Tensor:
    position = 0 if node.target is aten.scalar_tensor.default else 1
    value = node.args[position]
    if isinstance(value, (Node, list, tuple)):
        raise NotPointwise(f"{node}: filled with {value!r}")
    return torch.tensor(value, dtype=node.meta["val"].dtype)


def _moved(node: Node, source: Node, at: Position) -> Position:
    """Where ``source`` is read when the moving operation ``node`` is read at ``at``."""
    op, args, shape, out_shape = node.target, node.args, sizes(source), sizes(node)
    if op in views.RESHAPES:
        return _unflatten(_flatten(at, out_shape), shape) if shape != out_shape else at
    if op in views.TURNS:
        order = _permutation(node, len(shape))
        back: list[Tensor] = list(at)
        for out_dim, in_dim in enumerate(order):
            back[in_dim] = at[out_dim]
        return tuple(back)
    if op is aten.unsqueeze.default:
        dim = _int(args[1]) % len(at)
        return at[:dim] + at[dim + 1 :]
    if op in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        # squeeze only drops dimensions of size 1, so it is a reshape
        return _unflatten(_flatten(at, out_shape), shape)
    if op is aten.expand.default:
        tail = at[len(at) - len(shape) :] if shape else ()
        return tuple(torch.zeros_like(p) if s == 1 else p for s, p in zip(shape, tail, strict=True))
    if op is aten.slice.Tensor:
        dim, start, _, step = _slice(node, shape)
        return tuple(p * step + start if d == dim else p for d, p in enumerate(at))
    if op is aten.select.int:
        dim, index = _int(args[1]) % len(shape), _int(args[2])
        fixed = torch.full_like(at[0], index % shape[dim]) if at else torch.tensor(index % shape[dim])
        return (*at[:dim], fixed, *at[dim:])
    return at


def _permutation(node: Node, rank: int) -> list[int]:
    if node.target is aten.permute.default:
        return [_int(d) % rank for d in node.args[1]]  # type: ignore[union-attr]
    order = list(range(rank))
    a, b = (0, 1) if node.target is aten.t.default else (_int(node.args[1]) % rank, _int(node.args[2]) % rank)
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order


def _slice(node: Node, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    given: Any = node.args[1:]
    dim, start, end, step = (*given, *(0, 0, None, 1)[len(given) :])
    dim = _int(dim) % len(shape)
    bounds = slice(None if start is None else _int(start), None if end is None else _int(end), _int(step))
    return dim, *bounds.indices(shape[dim])


def _flatten(at: Position, shape: tuple[int, ...]) -> Tensor:
    linear = torch.zeros((), dtype=torch.int64)
    for size, p in zip(shape, at, strict=True):
        linear = linear * size + p
    return linear


def _unflatten(linear: Tensor, shape: tuple[int, ...]) -> Position:
    at: list[Tensor] = []
    for size in reversed(shape):
        at.insert(0, linear % size)
        linear = linear // size
    return tuple(at)
