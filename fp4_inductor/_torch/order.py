"""What is known of the order of kernels in the graph being lowered: may one begin while the kernel before it is still running?"""

from __future__ import annotations

from collections.abc import Sequence

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


def why_not_early(activations: Sequence, weight: Sequence) -> str:
    """Empty if a kernel that reads ``weight`` may do so before the kernel that runs before it on its stream has ended; else what is not known.

    Proven by two facts. A kernel of this graph made the ``activations``, so that the kernel before is one of this graph, whatever the scheduler's order. No
    kernel of this graph writes ``weight``: it is an input or a constant that nothing has changed so far, and what changes it later is ordered behind its
    reader. Arguments are realised buffers, or views of them.
    """
    graph = V.graph
    if isinstance(graph, SubgraphLowering):
        return "inside a subgraph, whose inputs may be computed by the graph around it"
    if _has_streams():
        return "the graph has streams of its own"
    outside = {*graph.graph_inputs, *graph.constants}
    names = [t.get_name() for t in weight]
    if not outside.issuperset(names):
        return "its weight is computed by the graph"
    if not graph.mutated_buffers.isdisjoint(names):
        return "its weight is changed by the graph"
    device = weight[0].get_device()
    if not any(_by_a_kernel(graph.try_get_buffer(t.get_name()), device) for t in activations):
        return "no kernel of the graph is known to run before it: its activations are not computed by one"
    return ""


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
