"""fp4.moe on a CPU: expert by expert, only those that some token chose, each through the packed kernels of fp4.linear or fp4.sparse_linear."""

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
    weight_on_input: bool = False, expert_map: Tensor | None = None, large_m: str = "auto", gate_up_meta: Tensor | None = None, down_meta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``[T, N]``; sums in float32, in ascending order of the expert."""
    contract.check(
        hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, down_scale, down_global_scale,
        gate_up_bias, down_bias, activation, alpha, limit, interleaved, weight_on_input, expert_map, large_m, gate_up_meta, down_meta,
    )  # fmt: skip
    act = Activation(activation, alpha, limit, interleaved)
    inner = contract.columns(down_qdata, down_meta)
    local = contract.local_ids(expert_ids, expert_map, gate_up_qdata.shape[0])
    weights = expert_weights.float()
    gate_up = gate_up_qdata, gate_up_scale, gate_up_global_scale.reshape(-1), gate_up_meta
    down = down_qdata, down_scale, down_global_scale.reshape(-1), down_meta
    out = hidden.new_zeros((hidden.shape[0], down_qdata.shape[1]), dtype=torch.float32)
    for e in contract.used_experts(local):
        token, slot = torch.where(local == e)
        dtype = torch.float32 if token.numel() <= _EXACT_ROWS else hidden.dtype
        x, w = hidden[token], weights[token, slot, None]
        x = (x * w if weight_on_input else x).to(dtype)
        z = _linear(x, e, *gate_up, None if gate_up_bias is None else gate_up_bias[e].to(dtype))
        h = act(z.float(), inner).to(dtype)
        y = _linear(h, e, *down, None if down_bias is None else down_bias[e].to(dtype)).float()
        out.index_add_(0, token, y if weight_on_input else y * w)
    return out.to(hidden.dtype)


def _linear(x: Tensor, e: int, codes: Tensor, scale: Tensor, global_scale: Tensor, meta: Tensor | None, bias: Tensor | None) -> Tensor:
    if meta is None:
        return torch.ops.fp4.linear(x, codes[e], scale[e], global_scale[e], bias)
    return torch.ops.fp4.sparse_linear(x, codes[e], meta[e], scale[e], global_scale[e], bias)
