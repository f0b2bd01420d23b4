"""Is this node the result of a mixture-of-experts layer, and of which tensors?

With everything in the form of :mod:`.sums`, an MoE layer is

    out[t, n] = sum over slots j of w[t, j] * (sum over i of Down[e, n, i] * A[t, j, i] + b2[e, n]),   e = ids[t, j]
    A[t, j, i] = act(g, u);   g, u = sum over h of GateUp[e, i or i + I, h] * x[t, h] + b1[e, ..]

and nothing else: the same e everywhere, x without j, one w. Experts written out densely (one-hot, scattered weights) have
a sum over e with a factor ``ids[t, j] == e`` in it, which is that e.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..layout import is_call
from . import index as ix
from .index import Const, Index, Position, Unproven, Value, Var
from .read import Read, aten, dtype_of, shape_of
from .scatter import added_rows
from .summand import Proof, ProvenLayer
from .sums import Mask, Sums, Term, filled, operand

_MOST_SPLITS = 8
_MOST_TERMS = 1024
_ADDS_ROWS = {aten.index_put.default, aten.index_add.default}


@dataclass
class Proven:
    """``root`` is the result of ``layer``, whose products are computed in ``dtype``."""

    root: Node
    dtype: torch.dtype
    layer: ProvenLayer


def prove(root: Node) -> Proven:
    """The layer whose result ``root`` is.

    Raises:
        Unproven: with the reason, and how far the proof came.
    """
    dtype = dtype_of(root)
    # 16-bit experts may be weighted and summed in float32
    tried = (dtype, torch.bfloat16, torch.float16) if dtype == torch.float32 else (dtype,)
    best = Unproven("nothing was tried", -1)
    for compute in tried:
        try:
            return Proven(root, compute, _prove(root, compute))
        except Unproven as refused:
            best = max(best, refused, key=lambda r: r.stage)
    raise best


def _prove(root: Node, dtype: torch.dtype) -> ProvenLayer:
    splits: dict[tuple, tuple] = {}
    for _ in range(_MOST_SPLITS):
        try:
            return _layer(root, Sums(dtype, splits))
        except ix.Split as need:
            key = (*need.var.origin[:-1], 0)
            if key in splits or len(need.var.origin) < 2:
                break
            splits[key] = need.sizes
        except ix.Unaligned:
            break
    raise Unproven("a reshape that does not line up with tokens, slots and channels", 1)


def _layer(root: Node, sums: Sums) -> ProvenLayer:
    shape = shape_of(root)
    if len(shape) < 2:
        raise Unproven("not a matrix of tokens")
    at: list[Index] = []
    tokens: list[Var] = []
    for d, size in enumerate(shape):
        index, new = sums.variable(size, "out", root, d)
        at.append(index)
        tokens += new if d < len(shape) - 1 else []
    n = at[-1]
    if not isinstance(n, Var):
        raise Unproven("output channels that are taken apart")
    summands = _summands(sums, sums.read(root, tuple(at)))
    # what is not part of a layer usually comes first: the accumulator, a residual
    layers = [Proof(sums, tokens, n).layer(term) for term in summands]
    layers = [layers[0], *(_in_terms_of(layers[0], layer) for layer in layers[1:])]
    if layers[0].kind == "loop":
        return _over_experts(layers)
    return layers[0] if len(layers) == 1 else _over_slots(root, sums, layers)


def _summands(sums: Sums, read: Read) -> list[Term]:
    """The terms of a chain of additions, in place of rows or of all."""
    out: list[Term] = []
    todo: list[Read | Term] = [read]
    while todo:
        term = todo.pop()
        if isinstance(term, Term):
            out.append(term)
            continue
        node = term.node
        if filled(node) == 0.0:
            continue
        plain = is_call(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1
        if plain and isinstance(node.args[1], Node) and _adds_terms(node):
            todo += [operand(sums, part, term.at) for part in reversed(node.args)]  # type: ignore[arg-type]
        elif plain and node.args[1] == 0:
            todo.append(operand(sums, node.args[0], term.at))  # type: ignore[arg-type]
        elif node.op == "call_function" and node.target in _ADDS_ROWS and (added := added_rows(sums, node, term.at)) is not None:
            todo += [added, sums.read(node.args[0], term.at)]  # type: ignore[arg-type]
        else:
            out.append(Term([term]))
        if len(out) > _MOST_TERMS:
            raise Unproven("too many terms")
    if not out:
        raise Unproven("a sum of nothing")
    return out


def _adds_terms(node: Node) -> bool:
    """Both operands have the result's shape: not the addition of a bias by broadcasting."""
    shapes = [shape_of(part) for part in (*node.args, node)]
    return all(len(s) == len(shapes[-1]) and all(map(ix.equal, s, shapes[-1])) for s in shapes)


def _over_experts(layers: list[ProvenLayer]) -> ProvenLayer:
    """One summand per expert, each weighted by what the chosen ids give it."""
    first = layers[0]
    experts = first.down.shape[0]
    numbers = [layer.down.expert for layer in layers]
    if not experts.is_Integer or sorted(n.value for n in numbers if isinstance(n, Const)) != list(range(int(experts))):
        raise Unproven("a sum over experts that does not have each of them once", 3)
    for layer in layers[1:]:
        if not _equal(layer, first) or (layer.ids, layer.weights) != (first.ids, first.weights):
            raise Unproven("experts that are computed differently", 3)
    return replace(first, products=[p for layer in layers for p in layer.products])


def _over_slots(root: Node, sums: Sums, layers: list[ProvenLayer]) -> ProvenLayer:
    """One summand per slot: column j of the ids, weighted by column j of the weights."""
    first = layers[0]
    index, new = sums.variable(ix.expression(len(layers)), "slots", root)
    for layer in layers[1:]:
        if not _equal(layer, first) or layer.ids.node is not first.ids.node or layer.weights.node is not first.weights.node or layer.down.expert != layer.ids:
            raise Unproven("a sum of different layers", 3)
    ids = _generalised([layer.ids.at for layer in layers], index)
    weights = _generalised([layer.weights.at for layer in layers], index)
    return replace(
        first,
        ids=Value(first.ids.node, ids), weights=Read(first.weights.node, weights, first.weights.rounded), slots=[*first.slots, *new],
        products=[p for layer in layers for p in layer.products], kind="loop",
    )  # fmt: skip


def _generalised(ats: list[Position], index: Index) -> Position:
    """One position for all: where they differ they must be 0, 1, .., each once and in the same order."""
    out = []
    for parts in zip(*ats, strict=True):
        if all(p == parts[0] for p in parts):
            out.append(parts[0])
        elif list(parts) == [Const(j) for j in range(len(parts))]:
            out.append(index)
        else:
            raise Unproven("slots that are not taken one after the other", 3)
    return tuple(out)


def _in_terms_of(first: ProvenLayer, layer: ProvenLayer) -> ProvenLayer:
    """``layer`` with the variables of ``first`` where it has its own for the same thing."""
    if [v.size for v in layer.slots] != [v.size for v in first.slots]:
        raise Unproven("a sum of layers with different numbers of slots", 3)
    new: dict[Var, Index] = dict(zip((layer.channel, *layer.slots), (first.channel, *first.slots), strict=True))

    def renamed(read: Read) -> Read:
        return Read(read.node, tuple(ix.substitute(i, new) for i in read.at), read.rounded)

    ids = renamed(Read(layer.ids.node, layer.ids.at))
    return replace(
        layer,
        slots=first.slots, channel=first.channel, ids=Value(ids.node, ids.at), x=renamed(layer.x), weights=renamed(layer.weights),
        masks=[Mask(renamed(m.condition), m.keeps) for m in layer.masks],
    )  # fmt: skip


def _equal(a: ProvenLayer, b: ProvenLayer) -> bool:
    """The same layer but for which expert or slot it is a part of."""

    def key(layer: ProvenLayer) -> tuple:
        biases = tuple(b if b is None else b.node for b in (layer.gate_up_bias, layer.down_bias))
        routing = (layer.tokens, layer.slots, layer.weight_on_input, layer.constant, layer.masks)
        return (layer.x, layer.gate_up.parts, layer.down.parts, biases, layer.activation, routing)

    return key(a) == key(b)
