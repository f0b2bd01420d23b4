"""``fp4.moe_backward(grad [T, N], ...) -> (grad of hidden [T, H], grad of expert_weights [T, k])``; arguments as ``fp4.moe``'s.

The forward pass is computed again, expert by expert, in float32: nothing of size T * k * I is kept between the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import moe
from .contract import OpContract, no_gradient
from .moe_call import ExpertWeight, MoeBackwardCall, MoeCall


def reference(given: MoeBackwardCall) -> tuple[Tensor, Tensor]:
    """float32 arithmetic on the dequantised experts, of which only those with tokens are read."""
    call = given.call
    moe.check(call)
    act, inner = call.activation, call.inner
    local = moe.local_ids(call.expert_ids, call.expert_map, call.experts)
    weights = call.expert_weights.float()
    # Gathered rows keep the layout of what they are gathered from, and a GEMM may sum transposed operands in another order.
    grad, hidden = given.grad.contiguous(), call.hidden.contiguous()
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(call.expert_weights, dtype=torch.float32, memory_format=torch.contiguous_format)
    for e in moe.used_experts(local):
        token, slot = torch.where(local == e)
        x, w, g = hidden[token].float(), weights[token, slot, None], grad[token].float()
        gate_up = _dense(e, call.gate_up, act.interleaved)
        down = _dense(e, call.down)
        z = (x * w if call.weight_on_input else x) @ gate_up.t()
        z = z if call.gate_up.bias is None else z + call.gate_up.bias[e].float()
        if not call.weight_on_input:
            y = act(z, inner) @ down.t()
            y = y if call.down.bias is None else y + call.down.bias[e].float()
            grad_weights[token, slot] = (g * y).sum(-1)
            g = g * w
        grad_x = act.gradient(z, inner, g @ down) @ gate_up
        if call.weight_on_input:
            grad_weights[token, slot] = (grad_x * x).sum(-1)
            grad_x = grad_x * w
        moe.add_rows(grad_hidden, token, grad_x)
    return grad_hidden.to(hidden.dtype), grad_weights.to(call.expert_weights.dtype)


def _dense(e: int, weight: ExpertWeight, interleaved: bool = False) -> Tensor:
    """float32 ``[N, K]`` of one expert, by the device's kernels."""
    decode = torch.ops.fp4.dequantize if weight.meta is None else torch.ops.fp4.sparse_dequantize
    return moe.dense_expert(decode, e, weight, interleaved)


def fake(given: MoeBackwardCall) -> tuple[Tensor, Tensor]:
    call = given.call
    moe.check(call)
    return call.hidden.new_empty(call.hidden.shape), call.expert_weights.new_empty(call.expert_weights.shape)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for description, args in moe.inputs(device):
        call = MoeCall.of(*args)
        grad = torch.randn(call.hidden.shape[0], call.width, device=device).to(call.hidden.dtype)
        yield description, MoeBackwardCall(grad, call).flat()


CONTRACT = OpContract(
    name="moe_backward",
    schema="(Tensor grad, " + moe.CONTRACT.schema.removeprefix("(").replace(', str prefill="auto"', "").removesuffix("Tensor") + "(Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float32: 4e-6, torch.bfloat16: 7e-3, torch.float16: 1e-3},
    struct=MoeBackwardCall,
)
CONTRACT.implement("CompositeExplicitAutograd", reference)
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: None)
