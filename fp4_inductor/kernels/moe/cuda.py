"""fp4.moe on CUDA: by the kernels that ``select.plan`` gives. No host read (but for float32), current stream, no atomics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DeviceError
from ...ops import moe as contract
from ...ops.activation import Activation
from ...ops.moe_call import ExpertWeight, MoeCall
from .. import host, select
from .by_expert import BY_EXPERT


class Asked(NamedTuple):
    """What the weights of a layer ask of a kernel: arguments of :func:`.host.row_for`."""

    op: str
    width: int
    form: tuple[str, ...]
    counts: select.Counts


def asked_by(gate_up: ExpertWeight, down: ExpertWeight, activation: Activation, on_input: bool) -> Asked:
    biases = (b.dtype for b in (gate_up.bias, down.bias) if b is not None)
    op = select.moe_op(gate_up.meta, down.meta)
    form = select.moe_form(activation.name, gate_up.n != down.k, down.k, down.experts, on_input, biases, op)
    return Asked(op, down.n, form, select.Counts(down.experts, select.scales_of(gate_up.global_scale.shape)))


def moe(call: MoeCall) -> Tensor:
    """``[T, N]`` by the kernel that ``select.plan`` gives for this T * k and E."""
    contract.check(call)
    if call.hidden.device.type != "cuda":
        value = str(call.hidden.device)
        raise DeviceError("the CUDA kernel of fp4.moe got tensors elsewhere", value=value, limit="cuda", remedy="Move them with .to('cuda').")
    return serve(call, asked_by(call.gate_up, call.down, call.activation, call.weight_on_input))


def serve(call: MoeCall, asked: Asked) -> Tensor:
    """:func:`moe` of a call on CUDA that ``contract.check`` accepts."""
    hidden, k = call.hidden, call.hidden.shape[1]
    if call.assignments == 0 or asked.counts.experts == 0 or asked.width == 0:
        return hidden.new_zeros((hidden.shape[0], asked.width))
    if k == 0 or call.inner == 0:  # biases alone remain; a shape no model has
        return contract.reference(call)
    counts = asked.counts if call.expert_map is None else asked.counts._replace(experts=call.chosen_from)
    kernel = host.row_for(asked.op, hidden, call.assignments, asked.width, k, call.prefill, asked.form, counts).implementation
    launch = kernel.source()
    if kernel.name == BY_EXPERT:
        return launch(call)
    with torch.cuda.device_of(hidden):
        return launch(dense(call))


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
