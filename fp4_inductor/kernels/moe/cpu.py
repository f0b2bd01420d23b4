"""fp4.moe on a CPU: expert by expert, only those that some token chose, each through fp4.linear's packed kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import moe as contract
from ...ops.activation import Activation

_EXACT_ROWS = 8  # up to here fp4.linear multiplies packed float32 rows: rounding the activations to bfloat16 would save nothing


def moe(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    gate_up_qdata: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor, down_qdata: Tensor, down_scale: Tensor, down_global_scale: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.0, limit: float | None = None, interleaved: bool = False,
    weight_on_input: bool = False, expert_map: Tensor | None = None, large_m: str = "auto",
) -> Tensor:  # fmt: skip
    """``[T, N]``; sums in float32, in ascending order of the expert."""
    contract.check(
        hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, down_scale, down_global_scale,
        gate_up_bias, down_bias, activation, alpha, limit, interleaved, weight_on_input, expert_map, large_m,
    )  # fmt: skip
    act = Activation(activation, alpha, limit, interleaved)
    linear = torch.ops.fp4.linear
    inner = down_qdata.shape[2] * 2
    local = contract.local_ids(expert_ids, expert_map, gate_up_qdata.shape[0])
    weights = expert_weights.float()
    gate_up_g, down_g = gate_up_global_scale.reshape(-1), down_global_scale.reshape(-1)
    out = hidden.new_zeros((hidden.shape[0], down_qdata.shape[1]), dtype=torch.float32)
    for e in contract.used_experts(local):
        token, slot = torch.where(local == e)
        dtype = torch.float32 if token.numel() <= _EXACT_ROWS else hidden.dtype
        x, w = hidden[token], weights[token, slot, None]
        x = (x * w if weight_on_input else x).to(dtype)
        z = linear(x, gate_up_qdata[e], gate_up_scale[e], gate_up_g[e], None if gate_up_bias is None else gate_up_bias[e].to(dtype))
        h = act(z.float(), inner).to(dtype)
        y = linear(h, down_qdata[e], down_scale[e], down_g[e], None if down_bias is None else down_bias[e].to(dtype)).float()
        out.index_add_(0, token, y if weight_on_input else y * w)
    return out.to(hidden.dtype)
