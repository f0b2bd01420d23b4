"""A proven layer becomes one ``fp4.moe``."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..._torch.fx import in_one_mutation_region
from ...formats import nvfp4
from ...ops.moe_call import ExpertWeight, MoeCall
from ..counters import matched
from ..emit import emit, erase
from ..layout import is_call
from . import layout
from .index import Unproven
from .layer import Proven
from .read import Read, aten, dtype_of, prims, shape_of
from .routing import may_be_negative
from .sums import ExpertEntry

_ID_DTYPES = (torch.int32, torch.int64)


def rewrite(proven: Proven) -> None:
    """Replace ``proven.root``.

    Raises:
        Unproven: part of the layer is used elsewhere, or a tensor cannot be brought into the op's shape. Nothing is changed.
    """
    root, layer = proven.root, proven.layer
    region = _region(proven)
    inside = set(region)
    for node in region:
        other = next((u for u in node.users if u not in inside), None)
        if node is not root and other is not None:
            raise Unproven(f"{node} inside the layer is also used by {other}", 4)
    if not in_one_mutation_region([*region, *layer.gate_up.parts, *layer.down.parts, layer.x.node, layer.ids.node, layer.weights.node]):
        raise Unproven("something the layer reads is written to in between", 4)
    pairs = (layer.tokens, layer.slots)
    x = layout.plan(_in_dtype(layer.x, proven.dtype), (layer.tokens, [layer.channel]), "the first product's input")
    ids = layout.plan(Read(layer.ids.node, layer.ids.at), pairs, "the choice of experts")
    weights = layout.plan(layer.weights, pairs, "the router's weight")
    masks = [(layout.plan(m.condition, pairs, "a mask"), m.keeps) for m in layer.masks]
    graph = root.graph
    with graph.inserting_before(root):
        new = _call(proven, x, ids, weights, masks)
    new.meta.update({k: v for k, v in root.meta.items() if k not in ("val", "eager_input_vals")})
    root.replace_all_uses_with(new)
    erase(root)
    _erase_counts(graph)
    matched(f"moe_{layer.kind}")


def _call(proven: Proven, x: layout.Layout, ids: layout.Layout, weights: layout.Layout, masks: list[tuple[layout.Layout, bool]]) -> Node:
    layer, root = proven.layer, proven.root
    graph = root.graph
    chosen = _cast(layout.write(ids), *_ID_DTYPES[::-1])
    if layer.kind == "batched_mm" and may_be_negative(layer.ids.node):
        from_the_end = emit(graph, aten.add.Tensor, (chosen, int(layer.down.shape[0])))
        chosen = emit(graph, aten.where.self, (emit(graph, aten.lt.Scalar, (chosen, 0)), from_the_end, chosen))
    for mask, keeps in masks:
        none = emit(graph, aten.full.default, ([], -1), {"dtype": dtype_of(chosen), "device": chosen.meta["val"].device, "pin_memory": False})
        chosen = emit(graph, aten.where.self, (layout.write(mask), *((chosen, none) if keeps else (none, chosen))))
    weight = _cast(layout.write(weights), torch.float32, *nvfp4.HIGH_PRECISION)
    if weights.read.rounded is not None:
        weight = _cast(weight, weights.read.rounded)
    if layer.constant != 1:
        weight = emit(graph, aten.mul.Tensor, (_cast(weight, torch.float32), layer.constant))
    gate_up, down = (
        ExpertWeight.of_parts(_parts(w), None if b is None else b.node) for w, b in ((layer.gate_up, layer.gate_up_bias), (layer.down, layer.down_bias))
    )
    call = MoeCall(_cast(layout.write(x), proven.dtype), chosen, weight, gate_up, down, layer.activation, layer.weight_on_input)
    out = _cast(emit(graph, torch.ops.fp4.moe.default, call.flat()), dtype_of(root))
    return layout.reshape(out, shape_of(root), root)


def _erase_counts(graph: Graph) -> None:
    """Remove ``nonzero`` where only the checks of how much it found are left: it would make the host wait for the device."""
    for node in graph.find_nodes(op="call_function", target=aten.nonzero.default):
        below = [node]
        for reader in below:  # grows while it is walked
            below += [user for user in reader.users if user not in below]
        checks = all(n is node or n.target is aten._assert_scalar.default or not isinstance(n.meta.get("val"), torch.Tensor) for n in below)
        if checks and all(n.op == "call_function" and (n.users or n.target is aten._assert_scalar.default) for n in below):
            while len(below) > 1:
                last = next(n for n in below if not n.users)
                below.remove(last)
                graph.erase_node(last)
            erase(node)


def _parts(weight: ExpertEntry) -> list[Node]:
    *matrices, global_scale = weight.parts
    return [*matrices, layout.reshape(global_scale, weight.shape[:1])]


def _cast(node: Node, to: torch.dtype, *accepted: torch.dtype) -> Node:
    """``node`` in ``to``, unless its dtype is one of ``accepted``."""
    return node if dtype_of(node) in (to, *accepted) else emit(node.graph, prims.convert_element_type.default, (node, to))


def _in_dtype(read: Read, dtype: torch.dtype) -> Read:
    """The same element where it has been converted to ``dtype`` already, if it has."""
    for user in read.node.users:
        if dtype_of(read.node) != dtype and is_call(user, prims.convert_element_type.default) and dtype_of(user) == dtype:
            return Read(user, read.at)
    return read


def _region(proven: Proven) -> list[Node]:
    """The nodes from the first products to the root: what the op replaces."""
    layer, root = proven.layer, proven.root
    leaves = {layer.x.node, layer.ids.node, layer.weights.node, *layer.gate_up.parts, *layer.down.parts, *(m.condition.node for m in layer.masks)}
    leaves |= {b.node for b in (layer.gate_up_bias, layer.down_bias) if b is not None}
    reaches: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            reaches[node] = node in layer.products or any(reaches.get(n, False) for n in node.all_input_nodes)
        elif node not in reaches:
            reaches[node] = False
            stack.append((node, True))
            if node not in leaves and node not in layer.products:
                stack += [(n, False) for n in node.all_input_nodes]
    return [node for node, inside in reaches.items() if inside]
