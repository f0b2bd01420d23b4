"""fp4.moe expert by expert, only those that some token chose, each through fp4.linear or fp4.sparse_linear: a CPU's way, a GPU's for float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import moe as contract
from ...ops.moe_call import ExpertWeight, MoeCall
from ..forms import Launches
from ..kernel import ANY, RIGHT, Kernel, On
from ..linear import cpu as linear

fp4 = torch.ops.fp4
_EXACT_ROWS = 8  # up to here fp4.linear multiplies packed float32 rows: rounding the activations to bfloat16 would save nothing


def moe(call: MoeCall) -> Tensor:
    """``[T, N]``; sums in float32, in ascending order of the expert."""
    contract.check(call)
    hidden, act, on_input, inner = call.hidden, call.activation, call.weight_on_input, call.inner
    local = contract.local_ids(call.expert_ids, call.expert_map, call.experts)
    gate_up = _Experts(call.gate_up, call.prefill, act.interleaved)
    down = _Experts(call.down, call.prefill)
    out = hidden.new_zeros((hidden.shape[0], call.width), dtype=torch.float32)
    for e, token, w in _by_expert(local, call.expert_weights.float()):
        x = hidden.index_select(0, token)
        x = (x * w if on_input else x).to(torch.float32 if token.numel() <= _EXACT_ROWS else hidden.dtype)
        h = act(gate_up.product(e, x).float(), inner).to(x.dtype)
        y = down.product(e, h)
        # The product of bfloat16 and float32 is float32.
        contract.add_rows(out, token, y.float() if on_input else y * w)
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

    def __init__(self, weight: ExpertWeight, prefill: str, interleaved: bool = False):
        self.packed = tuple(t.contiguous() for t in weight.packed)
        self.scale, self.bias, self.prefill, self.interleaved = weight.scale.contiguous(), weight.bias, prefill, interleaved
        g = weight.global_scale if contract.has_two_scales(weight.global_scale) else weight.global_scale.reshape(-1)
        self.global_scale = g.tolist() if weight.qdata.device.type == "cpu" else g

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


_BY_EXPERT = "no tensor cores serve this dtype or shape; reads the ids back, so there is no CUDA graph"
BY_EXPERT = "by expert"
KERNELS = tuple(
    Kernel(op, BY_EXPERT, "by_expert", (On(80, 129, RIGHT, _BY_EXPERT),), ANY, batch=(1, "not examined"), form=Launches("moe.by_expert:moe"))
    for op in ("moe", "sparse_moe")
)
