"""What is known of the order of kernels in the graph being lowered: may one begin while the kernel before it is still running?"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V

aten = torch.ops.aten
# Operators that launch kernels on the current stream, besides our own.
_LAUNCH = (
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
)  # fmt: skip
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def why_not_early(activations: Sequence, weight: Sequence, promised: bool = False) -> str:
    """Empty if a kernel that reads ``weight`` may do so before the kernel that runs before it on its stream has ended; else what is not known.

    Proven by two facts. A kernel of this graph made the ``activations``, so that the kernel before is one of this graph, whatever the scheduler's order. No
    kernel of this graph writes ``weight``: it is an input or a constant that nothing has changed so far, and what changes it later is ordered behind its
    reader. A region (``torch.compiler.nested_compile_region``) is lowered once for all of its calls, so there each call has to pass a weight that is an
    input or a constant of the graph around it and that nothing writes, and activations that come from outside have to be what a kernel of that graph made.
    Arguments are realised buffers, or views of them. ``promised``: what runs before the graph writes no weight, so that the first kernel may be early, too.
    """
    graph = V.graph
    if _has_streams():
        return "the graph has streams of its own"
    outside = {*graph.graph_inputs, *graph.constants}
    names = [t.get_name() for t in weight]
    if not outside.issuperset(names):
        return "its weight is computed by the graph"
    if isinstance(graph, SubgraphLowering) and not _stay(graph, names):
        return "inside a subgraph, and the graph around it may compute or change its weight"
    if not graph.mutated_buffers.isdisjoint(names):
        return "its weight is changed by the graph"
    device = weight[0].get_device()
    if not promised and not any(
        _by_a_kernel(graph.try_get_buffer(t.get_name()), device) or _by_a_kernel_around(graph, t.get_name(), device) for t in activations
    ):
        return "no kernel of the graph is known to run before it: its activations are not computed by one"
    return ""


_region = torch.ops.higher_order.invoke_subgraph
_OPERANDS = 2  # of a call of a region: its graph and its name come first


def _stay(graph: SubgraphLowering, names: Sequence[str]) -> bool:
    """Is each of these inputs of a region, at every call of it, an input or a constant of the graph around it, and written by nothing?"""
    passed = _passed(graph, names)
    return passed is not None and all(isinstance(node, torch.fx.Node) and node.op in ("placeholder", "get_attr") and not _is_written(node) for node in passed)


def _passed(graph: SubgraphLowering, names: Sequence[str]) -> set[Any] | None:
    """What the calls of a region pass for these of its inputs; None: that is not known."""
    here: Any = graph.parent.current_node
    if here is None or here.target is not _region or isinstance(graph.parent, SubgraphLowering):  # of regions in regions nothing is known
        return None
    positions = {name: i for i, name in enumerate(graph.graph_inputs)}
    calls = [node for node in here.graph.nodes if node.target is _region and node.args[0].target == here.args[0].target]
    return {call.args[_OPERANDS + positions[name]] for call in calls for name in names if name in positions}


def _by_a_kernel_around(graph: Any, name: str, device: torch.device) -> bool:
    """Is ``name`` an input of a region that a kernel of the graph around it makes before every call?"""
    if not isinstance(graph, SubgraphLowering) or name not in graph.graph_inputs:
        return False
    passed = _passed(graph, [name])
    return bool(passed) and all(_launches(node, device) for node in passed or ())


def _launches(node: Any, device: torch.device) -> bool:
    """Does a kernel compute this value of a graph that is not lowered yet?"""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return False
    args: Any = node.args
    if node.target is operator.getitem and args[0].target is _region:
        region: Any = getattr(args[0].graph.owning_module, args[0].args[0].target)
        return _launches(next(iter(region.graph.find_nodes(op="output"))).args[0][args[1]], device)
    if node.target in _VIEWS:
        return _launches(args[0], device)
    example = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(example, torch.Tensor) or example.device != device:
        return False
    ours = node.target.namespace in ("fp4", "fp4_csrc") or node.target.overloadpacket in _LAUNCH
    return ours or (torch.Tag.pointwise in node.target.tags and bool(node.all_input_nodes)) or node.target is aten.embedding.default


def _is_written(node: Any) -> bool:
    """May something in its graph write this value, or a view of it?"""
    return any(_writes(user, node) for user in node.users)


def _writes(user: Any, node: Any) -> bool:
    if user.op == "output":
        return False
    if user.target is _region:
        region = getattr(user.graph.owning_module, user.args[0].target)
        inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
        return any(_is_written(inputs[i]) for i, operand in enumerate(user.args[_OPERANDS:]) if operand is node)
    if not isinstance(user.target, torch._ops.OpOverload):
        return True  # not known
    schema = user.target._schema
    given = {**dict(zip((a.name for a in schema.arguments), user.args, strict=False)), **user.kwargs}
    for argument in schema.arguments:
        value = given.get(argument.name)
        alias = argument.alias_info if value is node or (isinstance(value, (list, tuple)) and node in value) else None
        if alias is not None and (alias.is_write or _is_written(user)):
            return True
    return False


def _by_a_kernel(buffer, device: torch.device) -> bool:
    if buffer is None or buffer.get_device() != device:
        return False
    if isinstance(buffer, (ir.ComputedBuffer, ir.TemplateBuffer)):
        return not buffer.is_no_op()  # torch.empty
    call = buffer.inputs[0] if isinstance(buffer, ir.MultiOutput) else buffer
    operator = getattr(call, "op_overload", None)  # of one that is called as it is
    return operator is not None and (operator.namespace in ("fp4", "fp4_csrc") or operator.overloadpacket in _LAUNCH)


def _has_streams() -> bool:
    if "fp4_streams" not in V.graph.__dict__:
        node = V.graph.current_node
        targets = () if node is None else (n.target for n in node.graph.nodes if n.op == "call_function")
        V.graph.__dict__["fp4_streams"] = any(getattr(target, "namespace", "") == "streams" for target in targets)
    return V.graph.__dict__["fp4_streams"]
