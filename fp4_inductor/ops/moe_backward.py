"""``fp4.moe_backward(grad [T, N], ...) -> (grad of hidden [T, H], grad of expert_weights [T, k])``; arguments as ``fp4.moe``'s.

The forward pass is computed again, expert by expert, in float32: nothing of size T * k * I is kept between the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import moe
from .activation import Activation
from .contract import OpContract, no_gradient


def reference(
    grad: Tensor, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    gate_up_qdata: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor, down_qdata: Tensor, down_scale: Tensor, down_global_scale: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.0, limit: float | None = None, interleaved: bool = False,
    weight_on_input: bool = False, expert_map: Tensor | None = None, gate_up_meta: Tensor | None = None, down_meta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """float32 arithmetic on the dequantised experts, of which only those with tokens are read."""
    moe.check(
        hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, down_scale, down_global_scale,
        gate_up_bias, down_bias, activation, alpha, limit, interleaved, weight_on_input, expert_map, "auto", gate_up_meta, down_meta,
    )  # fmt: skip
    act = Activation(activation, alpha, limit, interleaved)
    inner = moe.columns(down_qdata, down_meta)
    local = moe.local_ids(expert_ids, expert_map, gate_up_qdata.shape[0])
    weights = expert_weights.float()
    # Gathered rows keep the layout of what they are gathered from, and a GEMM may sum transposed operands in another order.
    grad, hidden = grad.contiguous(), hidden.contiguous()
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(expert_weights, dtype=torch.float32, memory_format=torch.contiguous_format)
    for e in moe.used_experts(local):
        token, slot = torch.where(local == e)
        x, w, g = hidden[token].float(), weights[token, slot, None], grad[token].float()
        gate_up = _dense(e, gate_up_qdata, gate_up_scale, gate_up_global_scale, gate_up_meta, interleaved)
        down = _dense(e, down_qdata, down_scale, down_global_scale, down_meta)
        z = (x * w if weight_on_input else x) @ gate_up.t()
        z = z if gate_up_bias is None else z + gate_up_bias[e].float()
        if not weight_on_input:
            y = act(z, inner) @ down.t()
            y = y if down_bias is None else y + down_bias[e].float()
            grad_weights[token, slot] = (g * y).sum(-1)
            g = g * w
        grad_x = act.gradient(z, inner, g @ down) @ gate_up
        if weight_on_input:
            grad_weights[token, slot] = (grad_x * x).sum(-1)
            grad_x = grad_x * w
        moe.add_rows(grad_hidden, token, grad_x)
    return grad_hidden.to(hidden.dtype), grad_weights.to(expert_weights.dtype)


def _dense(e: int, codes: Tensor, scale: Tensor, global_scale: Tensor, meta: Tensor | None, interleaved: bool = False) -> Tensor:
    """float32 ``[N, K]`` of one expert, by the device's kernels."""
    decode = torch.ops.fp4.dequantize if meta is None else torch.ops.fp4.sparse_dequantize
    return moe.dense_expert(decode, e, codes, scale, global_scale, meta, torch.float32, interleaved)


def fake(grad: Tensor, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest) -> tuple[Tensor, Tensor]:
    # fp4.moe has prefill between expert_map and the metadata
    moe.check(hidden, expert_ids, expert_weights, *rest[:14], *(("auto", *rest[14:]) if len(rest) > 14 else ()))
    return hidden.new_empty(hidden.shape), expert_weights.new_empty(expert_weights.shape)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for description, args in moe.inputs(device):
        yield description, (torch.randn(args[0].shape[0], args[6].shape[1], device=device).to(args[0].dtype), *args[:17], *args[18:])


CONTRACT = OpContract(
    name="moe_backward",
    schema="(Tensor grad, " + moe.CONTRACT.schema.removeprefix("(").replace(', str prefill="auto"', "").removesuffix("Tensor") + "(Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float32: 4e-6, torch.bfloat16: 7e-3, torch.float16: 1e-3},
)
CONTRACT.implement("CompositeExplicitAutograd", reference)
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: None)
