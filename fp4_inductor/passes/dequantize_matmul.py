"""Matmuls by an NVFP4 weight -> ``fp4.linear`` / ``fp4.sparse_linear`` / ``fp4.bmm``.

The forms a matmul has after AOTAutograd and Inductor's decompositions; ``w`` is the weight operand ``[K, N]``:

* ``mm(x, w)``, ``addmm(bias, x, w)``, ``bmm(x, w)`` with one weight per matrix or one expanded over the batch;
* ``sum(unsqueeze(x, -1) * unsqueeze(w, ..), -2)``: what a CUDA mm or bmm with M == 1 (or N == 1) becomes under
  ``coordinate_descent_tuning``, before any graph pass runs; for 16-bit dtypes with both factors converted to float32
  and the sum converted back;
* ``mm`` and ``addmm`` with zero columns appended to ``w`` (and the bias), as Inductor's ``pad_mm`` does on CUDA when N is
  not aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node

from .._torch.fx import anchor
from ..formats import nvfp4
from .counters import matched
from .emit import emit, erase
from .layout import is_call, same, value
from .weight import Weight, weight_of

aten, prims = torch.ops.aten, torch.ops.prims
Rewrite = Callable[[], None]


def register() -> None:
    """Append the anchors to Inductor's post-grad patterns."""
    anchor(aten.mm.default, 2, lambda node: _plan("mm", node, node.args[0], node.args[1]))
    anchor(aten.addmm.default, 3, lambda node: _plan("addmm", node, node.args[1], node.args[2], node.args[0]))
    anchor(aten.bmm.default, 2, lambda node: _plan("bmm", node, node.args[0], node.args[1]))
    anchor(aten.sum.dim_IntList, 2, _plan_decomposed)


def _plan(form: str, out: Node, x: object, operand: object, bias: object = None) -> Rewrite | None:
    """A rewrite of ``out = x @ operand (+ bias)`` if the operand is an NVFP4 weight and nothing is lost."""
    if not isinstance(x, Node) or not isinstance(operand, Node):
        return None
    dtype = value(out).dtype
    if dtype not in nvfp4.HIGH_PRECISION or value(x).dtype != dtype:
        return None
    operand, bias, padding = _without_zero_columns(operand, bias)
    n = value(operand).shape[-1]
    if bias is not None and not (isinstance(bias, Node) and value(bias).dtype == dtype and value(bias).dim() == 1 and same(value(bias).shape[0], n)):
        return None
    weight = weight_of(operand, dtype, out)
    return None if weight is None else lambda: _rewrite(f"{weight.source}_{form}", out, x, weight, bias, padding)


def _plan_decomposed(out: Node) -> Rewrite | None:
    """``sum(unsqueeze(x, -1) * unsqueeze(w, 0 or 1), [-2])``, with the conversions around it for 16-bit dtypes."""
    product, dims = cast("tuple[Any, Any]", out.args)
    if not (is_call(product, aten.mul.Tensor) and isinstance(dims, (list, tuple)) and len(dims) == 1):
        return None
    left, right = product.args
    if not (is_call(left, aten.unsqueeze.default) and is_call(right, aten.unsqueeze.default)):
        return None
    (x, x_dim), (operand, w_dim) = left.args, right.args
    rank = value(x).dim()
    if rank not in (2, 3):
        return None
    if (x_dim % (rank + 1), w_dim % (rank + 1), dims[0] % (rank + 1)) != (rank, rank - 2, rank - 1):
        return None
    name = "mm_decomposed" if rank == 2 else "bmm_decomposed"
    if value(out).dtype == torch.float32 and _is_cast(x) and len(out.users) == 1 and _is_cast(user := next(iter(out.users))):
        source = x.args[0]
        if value(source).dtype == value(user).dtype:
            return _plan(name, user, source, operand)
    return _plan(name, out, x, operand)


def _without_zero_columns(operand: Node, bias: object) -> tuple[Node, object, int]:
    """``(w, bias, p)`` from ``w`` and a bias with p appended zeros; p = 0 and the operands themselves if there are none."""
    if not is_call(operand, aten.constant_pad_nd.default):
        return operand, bias, 0
    inner, pads, *fill = cast("tuple[Any, ...]", operand.args)
    if len(pads) < 2 or pads[0] != 0 or any(pads[2:]) or fill not in ([], [0], [0.0]) or not isinstance(pads[1], int) or pads[1] < 0:
        return operand, bias, 0
    if bias is None:
        return inner, None, pads[1]
    parts: Any = bias.args[0] if is_call(bias, aten.cat.default) else ()  # type: ignore[attr-defined]
    if len(parts) != 2 or not is_call(parts[1], aten.full.default) or parts[1].args[1] != 0:
        return operand, bias, 0
    return inner, parts[0], pads[1]


def _rewrite(pattern: str, out: Node, x: Node, weight: Weight, bias: Node | None, padding: int) -> None:
    graph = out.graph
    with graph.inserting_before(out):
        g = _global_scale(weight)
        if weight.per_matrix:
            qdata = weight.qdata if weight.meta is None else emit(graph, torch.ops.fp4.sparse_decompress.default, (weight.qdata, weight.meta))
            new = graph.call_function(torch.ops.fp4.bmm.default, (x, qdata, weight.scale, g))
        elif weight.meta is not None:
            new = graph.call_function(torch.ops.fp4.sparse_linear.default, (x, weight.qdata, weight.meta, weight.scale, g, bias))
        else:
            new = graph.call_function(torch.ops.fp4.linear.default, (x, weight.qdata, weight.scale, g, bias))
        if padding:
            fake = value(out)
            new.meta["val"] = fake.new_empty((*fake.shape[:-1], fake.shape[-1] - padding))
            new = graph.call_function(aten.constant_pad_nd.default, (new, [0, padding], 0.0))
    new.meta.update(out.meta)
    out.replace_all_uses_with(new)
    erase(out)
    matched(pattern)


def _global_scale(weight: Weight) -> Node:
    """The multiplying float32 global scale in the shape the ops take; emitted at the insertion point."""
    graph, device = weight.qdata.graph, value(weight.qdata).device
    if weight.global_scale is None:
        return emit(graph, aten.full.default, ([], 1.0), {"dtype": torch.float32, "device": device, "pin_memory": False})
    g = weight.global_scale
    if weight.source == "idiom" and value(g).dim():
        g = emit(graph, aten.reshape.default, (g, []))
    return emit(graph, aten.reciprocal.default, (g,)) if weight.divides else g


def _is_cast(node: object) -> bool:
    return is_call(node, prims.convert_element_type.default)
