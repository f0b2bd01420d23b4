"""``act(gate) * up`` of the two halves of one weight -> ``fp4.linear_glu``.

The halves are slices of one ``fp4.linear`` (a fused gate_up weight, as Phi3 has it, with one global scale or one for each half) or the two
results of one ``fp4.linear_siblings`` (gate and up of other models, after :mod:`.siblings`). What stands
between the gate and the product has as many spellings as torch has decompositions: it is evaluated on every value of the
activation's dtype, and compared with the activations the kernels know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._torch.fx import in_one_mutation_region, without_modes
from ..ops.linear_glu import ACTIVATIONS
from .counters import matched
from .emit import emit, erase
from .layout import is_call, linear_arguments, same, value
from .pointwise import is_elementwise
from .siblings import MEMBERS

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
LONGEST = 40  # operations of one activation; gelu takes about twelve


def fuse(graph: Graph) -> None:
    """Rewrite every such product in ``graph``."""
    for linear in graph.find_nodes(op="call_function", target=torch.ops.fp4.linear.default):
        halves = _halves(linear)
        *args, rows = linear_arguments(linear)
        if halves is not None and not linear.kwargs and (not rows or list(rows) == [0, value(linear).shape[-1] // 2]):
            _plan(graph, linear, *halves, tuple(args))
    for linear in graph.find_nodes(op="call_function", target=torch.ops.fp4.linear_siblings.default):
        *parts, rows, prefill = (*linear.args, "auto")[:7]  # the last one has a default
        n = value(parts[1]).shape[0]
        if list(rows) == [0, n // 2, n // 2, n]:  # type: ignore[arg-type]
            by_index = {u.args[1]: u for u in linear.users}
            if set(by_index) == {0, 1} and len(linear.users) == 2:
                _plan(graph, linear, by_index[0], by_index[1], (*parts, prefill))


def _halves(linear: Node) -> tuple[Node, Node] | None:
    """The only two users of ``linear``: its first and its second half along the last dimension."""
    n = value(linear).shape[-1]
    parts = list(linear.users)
    if len(parts) == 1 and parts[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        split = parts[0]
        sizes: Any = split.args[1]
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        even = sizes * 2 == n if type(sizes) is int else list(sizes) == [n // 2, n // 2]
        if not even or dim not in (-1, value(linear).dim() - 1):
            return None
        by_index = {u.args[1]: u for u in split.users}
        return (by_index[0], by_index[1]) if set(by_index) == {0, 1} and len(split.users) == 2 else None
    found = {_span(part, linear): part for part in parts}
    if type(n) is int and len(parts) == 2 and set(found) == {(0, n // 2), (n // 2, n)}:
        return found[0, n // 2], found[n // 2, n]
    return None


def _span(part: Node, of: Node) -> tuple[int, int] | None:
    """``(start, stop)`` of a slice of ``of`` along its last dimension."""
    if not is_call(part, aten.slice.Tensor):
        return None
    args: Any = part.args
    _, dim, start, stop, step = (*args, *(None, 0, None, None, 1)[len(args) :])
    rank, n = value(of).dim(), value(of).shape[-1]
    if dim % rank != rank - 1 or step != 1 or not all(b is None or type(b) is int for b in (start, stop)):
        return None
    first, last, _ = slice(start, stop).indices(n)
    return first, last


def _plan(graph: Graph, linear: Node, gate: Node, up: Node, args: tuple[Any, ...]) -> None:
    """Rewrite ``act(gate) * up`` if it is that; ``args``: (x, qdata, scale, global_scale, bias, prefill)."""
    product = next(iter(up.users))
    if len(up.users) != 1 or not is_call(product, aten.mul.Tensor) or product.args[0] is product.args[1]:
        return
    chain = _chain(gate, product.args[1] if product.args[0] is up else product.args[0], product)
    if chain is None or value(product).dtype != value(gate).dtype or not same_shape(product, gate):
        return
    act = name_of(gate, chain)
    if act is None or not in_one_mutation_region([linear, product]):
        return
    with graph.inserting_before(product):
        new = emit(graph, torch.ops.fp4.linear_glu.default, (*args[:5], act, args[5]))
    new.meta = {**product.meta, **new.meta}
    # The call is still that of the linear layer, for explain().
    new.meta |= {key: linear.meta[key] for key in (MEMBERS, "nn_module_stack") if key in linear.meta}
    product.replace_all_uses_with(new)
    erase(product)
    matched("linear_glu")


def same_shape(a: Node, b: Node) -> bool:
    return len(value(a).shape) == len(value(b).shape) and all(map(same, value(a).shape, value(b).shape))


def _chain(gate: Node, last: object, product: Node) -> list[Node] | None:
    """The operations from ``gate`` to ``last`` in order, if they are elementwise, read nothing else and are read by nothing else."""
    found: set[Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node is gate or node in found:
            continue
        if not isinstance(node, Node) or node.op != "call_function" or len(found) >= LONGEST:
            return None
        if not (node.target in CASTS or is_elementwise(node.target)) or not same_shape(node, gate):
            return None
        found.add(node)
        stack += node.all_input_nodes
    if not found or any(user not in found for user in gate.users) or any(user not in found and user is not product for node in found for user in node.users):
        return None
    return [node for node in gate.graph.nodes if node in found]


def name_of(gate: Node, chain: list[Node]) -> str | None:
    """The activation that ``chain`` computes, judged on every finite value of the gate's dtype (of bfloat16 for float32)."""
    dtype = value(gate).dtype
    with without_modes():
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        z = bits.view(dtype if dtype.itemsize == 2 else torch.bfloat16)
        z = z[z.isfinite()].to(dtype)
        values: dict[Node, Tensor] = {gate: z}
        for node in chain:
            args = torch.fx.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        got = values[chain[-1]].double()
        for name, f in ACTIVATIONS.items():
            want = f(z.double())
            # Steps in float32, perhaps rounded to the dtype between: 1 + erf and 1 + tanh cancel far below zero.
            if bool(((got - want).abs() <= 2.0**-6 * want.abs() + 4e-6 * z.double().abs().clamp(1, 30)).all()):
                return name
    return None
