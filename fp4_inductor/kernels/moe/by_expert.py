"""fp4.moe expert by expert, only those that some token chose, each through fp4.linear or fp4.sparse_linear: a CPU's way, a GPU's for float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import moe as contract
from ...ops.activation import Activation
from ..linear import cpu as linear

fp4 = torch.ops.fp4
_EXACT_ROWS = 8  # up to here fp4.linear multiplies packed float32 rows: rounding the activations to bfloat16 would save nothing


def moe(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    gate_up_qdata: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor, down_qdata: Tensor, down_scale: Tensor, down_global_scale: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.0, limit: float | None = None, interleaved: bool = False,
    weight_on_input: bool = False, expert_map: Tensor | None = None, prefill: str = "auto", gate_up_meta: Tensor | None = None, down_meta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``[T, N]``; sums in float32, in ascending order of the expert."""
    contract.check(
        hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, down_scale, down_global_scale,
        gate_up_bias, down_bias, activation, alpha, limit, interleaved, weight_on_input, expert_map, prefill, gate_up_meta, down_meta,
    )  # fmt: skip
    act = Activation(activation, alpha, limit, interleaved)
    inner, columns = contract.columns(down_qdata, down_meta), down_qdata.shape[1]
    local = contract.local_ids(expert_ids, expert_map, gate_up_qdata.shape[0])
    gate_up = _Experts(gate_up_qdata, gate_up_meta, gate_up_scale, gate_up_global_scale, gate_up_bias, prefill, interleaved)
    down = _Experts(down_qdata, down_meta, down_scale, down_global_scale, down_bias, prefill)
    out = hidden.new_zeros((hidden.shape[0], columns), dtype=torch.float32)
    for e, token, w in _by_expert(local, expert_weights.float()):
        x = hidden.index_select(0, token)
        x = (x * w if weight_on_input else x).to(torch.float32 if token.numel() <= _EXACT_ROWS else hidden.dtype)
        h = act(gate_up.product(e, x).float(), inner).to(x.dtype)
        y = down.product(e, h)
        # The product of bfloat16 and float32 is float32.
        contract.add_rows(out, token, y.float() if weight_on_input else y * w)
    return out.to(hidden.dtype)


def _by_expert(local: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, their weights ``[M, 1]``) for every expert that some token chose, ascending, the tokens too."""
    order = torch.argsort(local.reshape(-1), stable=True)
    used, counts = torch.unique_consecutive(local.reshape(-1)[order], return_counts=True)
    tokens, chosen = order // local.shape[1], weights.reshape(-1, 1)[order]
    sizes = counts.tolist()
    for e, token, w in zip(used.tolist(), tokens.split(sizes), chosen.split(sizes), strict=True):
        if e >= 0:
            yield e, token, w


class _Experts:
    """One stack of weights, dense or 2:4-sparse: checked once, multiplied expert by expert."""

    def __init__(self, codes: Tensor, meta: Tensor | None, scale: Tensor, global_scale: Tensor, bias: Tensor | None, prefill: str, interleaved: bool = False):
        self.packed = tuple(t.contiguous() for t in (codes, meta) if t is not None)
        self.scale, self.bias, self.prefill, self.interleaved = scale.contiguous(), bias, prefill, interleaved
        g = global_scale if contract.has_two_scales(global_scale) else global_scale.reshape(-1)
        self.global_scale = g.tolist() if codes.device.type == "cpu" else g

    def product(self, e: int, x: Tensor) -> Tensor:
        """``x [M, K] @ W[e].T + bias``, in ``x.dtype``."""
        if 0 in (*x.shape, self.scale.shape[1]):
            y = x.new_zeros(x.shape[0], self.scale.shape[1])
        else:
            y = self._product(x.contiguous(), tuple(t[e] for t in self.packed), self.scale[e], self.global_scale[e])
        if self.bias is not None:
            y += self.bias[e].to(x.dtype)
        return y.to(x.dtype)

    def _product(self, x: Tensor, packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor | float | list[float]) -> Tensor:
        if isinstance(global_scale, float) or (isinstance(global_scale, Tensor) and global_scale.dim() == 0):
            return self._multiply(x, packed, scale, global_scale)
        half = scale.shape[0] // 2
        rows = (slice(0, None, 2), slice(1, None, 2)) if self.interleaved else (slice(0, half), slice(half, None))
        both = [self._multiply(x, tuple(t[r].contiguous() for t in packed), scale[r].contiguous(), g) for r, g in zip(rows, global_scale, strict=True)]
        return torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)

    def _multiply(self, x: Tensor, packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor | float) -> Tensor:
        if isinstance(global_scale, float):  # on a CPU
            return linear.product(x, packed, scale, global_scale)
        return (fp4.linear if len(packed) == 1 else fp4.sparse_linear)(x, *packed, scale, global_scale, None, self.prefill)
