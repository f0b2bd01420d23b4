"""fp4.moe on CUDA: by the kernels that ``select.plan`` gives. No host read (but for float32), current stream, no atomics."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...errors import DeviceError
from ...ops import moe as contract
from ...ops.moe_call import ExpertWeight, MoeCall
from .. import host, select
from .by_expert import BY_EXPERT


def moe(call: MoeCall) -> Tensor:
    """``[T, N]`` by the kernel that ``select.plan`` gives for this T * k and E."""
    contract.check(call)
    hidden, gate_up, down, inner, experts = call.hidden, call.gate_up, call.down, call.inner, call.experts
    if hidden.device.type != "cuda":
        raise DeviceError("the CUDA kernel of fp4.moe got tensors elsewhere", value=str(hidden.device), limit="cuda", remedy="Move them with .to('cuda').")
    k, width = hidden.shape[1], call.width
    if call.assignments == 0 or experts == 0 or width == 0:
        return hidden.new_zeros((hidden.shape[0], width))
    if k == 0 or inner == 0:  # biases alone remain; a shape no model has
        return contract.reference(call)
    biases = tuple(b.dtype for b in (gate_up.bias, down.bias) if b is not None)
    op = select.moe_op(gate_up.meta, down.meta)
    form = _form(call.activation.name, call.gated, inner, experts, call.weight_on_input, biases, op)
    counts = select.Counts(experts, select.scales_of(gate_up.global_scale.shape))
    kernel = host.row_for(op, hidden, call.assignments, width, k, call.prefill, form, counts).implementation
    launch = kernel.source()
    if kernel.name == BY_EXPERT:
        return launch(call)
    with torch.cuda.device_of(hidden):
        return launch(dense(call))


_form = functools.lru_cache(maxsize=1024)(select.moe_form)


def dense(call: MoeCall) -> MoeCall:
    """``call`` as the kernels take it: contiguous and aligned, global scales ``[E]`` or ``[2 * E]``, those of gate and of up side by side."""
    table = call.expert_map
    return MoeCall(
        host.aligned(call.hidden), call.expert_ids.contiguous(), call.expert_weights.contiguous(), _dense_weight(call.gate_up), _dense_weight(call.down),
        call.activation, call.weight_on_input, None if table is None else table.contiguous(), call.prefill,
    )  # fmt: skip


def _dense_weight(w: ExpertWeight) -> ExpertWeight:
    bias, meta = None if w.bias is None else w.bias.contiguous(), None if w.meta is None else host.aligned(w.meta)
    return ExpertWeight(host.aligned(w.qdata), host.aligned(w.scale), w.global_scale.reshape(-1).contiguous(), bias, meta)
