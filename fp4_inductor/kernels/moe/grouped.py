"""triton_moe_grouped: assignments sorted by expert, weights decoded in registers. Dense or 2:4-sparse experts. Source: :mod:`.triton_grouped`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import forms
from ..forms import Launches
from ..kernel import COMPILED, MEASURED, RIGHT, Kernel, On
from .routing import activation, combine, parts, route


@dataclass(frozen=True)
class GroupedConfig:
    """``block_n`` outputs by ``block_m`` pairs of one expert."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(pairs: int, experts: int, gated: bool) -> GroupedConfig:
    """For ``pairs`` spread over ``experts``; with a gate a program holds two weights and two sums."""
    mean = pairs / max(experts, 1)
    if mean <= 12:
        return GroupedConfig(16, 32 if gated else 64, 128, 4, 3)
    if mean <= 24:
        return GroupedConfig(32, 32 if gated else 64, 128, 4, 3)
    return GroupedConfig(64, 64, 64, 4, 3)


def constants_of(c: GroupedConfig, dtype: torch.dtype, sparse: bool = False) -> dict[str, object]:
    return dict(SPARSE=sparse, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, BF16=dtype == torch.bfloat16, ASM=forms.ASM)


def grouped(call: MoeCall, tile: GroupedConfig | None = None) -> Tensor:
    """Routing, two grouped tensor-core products with the weights decoded in registers, the sum: four launches; see :mod:`.triton_grouped`."""
    from .triton_grouped import moe_grouped_down, moe_grouped_up

    c = tile or tile_for(call.assignments, call.chosen_from, call.gated)
    routing = route(call, c.block_m)
    n_slots = routing.tile_expert.shape[0]
    dtype, device = call.hidden.dtype, call.hidden.device
    h = torch.empty(call.assignments, call.inner, dtype=dtype, device=device)
    out = torch.empty(call.assignments, call.width, dtype=torch.float32, device=device)
    up, down = (constants_of(c, dtype, w.meta is not None) for w in (call.gate_up, call.down))
    shared = (routing.order, routing.ends, routing.tile_expert, routing.tile_start)
    launch = dict(num_warps=c.num_warps, num_stages=c.num_stages)
    moe_grouped_up[(-(-call.inner // c.block_n) * n_slots,)](
        call.hidden, call.expert_weights, *shared, *parts(call.gate_up), call.gate_up.bias, h, call.expert_ids.shape[1], call.inner, call.hidden.shape[1],
        **activation(call), HAS_BIAS=call.gate_up.bias is not None, TWO=call.two_scales, **up, **launch,
    )  # fmt: skip
    moe_grouped_down[(-(-call.width // c.block_n) * n_slots,)](
        h, *shared, *parts(call.down), call.down.bias, out, call.width, call.inner,
        HAS_BIAS=call.down.bias is not None, **down, **launch,
    )  # fmt: skip
    return combine(call, out, None)


_GROUPED = "pairs sorted by expert, weights decoded in registers: each is read once however many tokens share it"
_SPARSE_GROUPED = "the dense kernel on codes decompressed in registers: nothing dense in memory"
FORM = Launches("moe.grouped:grouped")
KERNELS = (
    Kernel(
        "moe", "triton_moe_grouped", "grouped", (On(90, 90, MEASURED, _GROUPED), On(80, 89, COMPILED, _GROUPED), On(100, 129, COMPILED, _GROUPED)),
        batch=(1, "not examined"), form=FORM,
    ),
    Kernel("sparse_moe", "triton_sparse_moe_grouped", "grouped", (On(80, 129, RIGHT, _SPARSE_GROUPED),), batch=(1, "not examined"), form=FORM),
)  # fmt: skip
