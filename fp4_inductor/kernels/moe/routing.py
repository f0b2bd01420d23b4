"""What several kernels of fp4.moe share on the host: the routing of assignments to experts, the operands, the sum over a token's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.moe_call import ExpertWeight, MoeCall

COMBINE_BLOCK = 512


def activation(call: MoeCall) -> dict[str, object]:
    """Constexprs of the kernels that apply it."""
    act = call.activation
    constants = dict(ALPHA=act.alpha, LIMIT=act.limit or 0.0, ACT=act.name, GATED=call.gated, INTERLEAVED=act.interleaved)
    return {**constants, "ON_INPUT": call.weight_on_input}


def ids_and_map(call: MoeCall) -> tuple[Tensor, Tensor | None, int]:
    """``(ids, map, size of the map)``."""
    return call.expert_ids, call.expert_map, 0 if call.expert_map is None else call.expert_map.shape[0]


def parts(w: ExpertWeight) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    return w.qdata, w.meta, w.scale.view(torch.uint8), w.global_scale


def route_tile(pairs: int) -> dict[str, int]:
    """Ids at a time of the routing kernel, which takes as many steps one after the other as they need."""
    return dict(BLOCK=1024, num_warps=4) if pairs <= 8192 else dict(BLOCK=4096, num_warps=16)


def slots(pairs: int, experts: int, block_m: int) -> int:
    """Slots for tiles: see :mod:`.triton_route`."""
    return pairs // block_m + experts


@dataclass(frozen=True)
class Routing:
    """What :mod:`.triton_route` writes."""

    order: Tensor
    place: Tensor
    ends: Tensor
    tile_expert: Tensor
    tile_start: Tensor


def route(call: MoeCall, block_m: int) -> Routing:
    """One launch. ``order`` behind the last expert's assignments, and ``place`` of those without an expert, stay unwritten."""
    from .triton_route import moe_route

    ids, table, table_size = ids_and_map(call)
    n_slots = slots(call.assignments, call.experts, block_m)
    sizes = (call.assignments, call.assignments, call.experts, n_slots, n_slots)
    steps = [-(-size // 4) * 4 for size in sizes]  # each part aligned to 16 bytes
    memory = torch.empty(sum(steps), dtype=torch.int32, device=ids.device)
    out = Routing(*(part[:size] for part, size in zip(memory.split(steps), sizes, strict=True)))
    moe_route[(call.experts,)](
        ids, table, out.order, out.place, out.ends, out.tile_expert, out.tile_start, call.assignments, call.experts, table_size, n_slots,
        BLOCK_M=block_m, HAS_MAP=table is not None, **route_tile(call.assignments),
    )  # fmt: skip
    return out


def combine(call: MoeCall, out: Tensor, place: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Each token's weighted sum of rows of ``out`` (row = assignment, or its ``place``), and of the bias of their experts. One launch."""
    from .triton_grouped import moe_combine

    ids, table, table_size = ids_and_map(call)
    t = call.hidden.shape[0]
    y = torch.empty(t, call.width, dtype=call.hidden.dtype, device=out.device)
    moe_combine[(-(-call.width // COMBINE_BLOCK) * t,)](
        out, place, ids, call.expert_weights, table, bias, y, call.experts, table_size, call.width,
        TOP_K=ids.shape[1], ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, SORTED=place is not None, HAS_BIAS=bias is not None,
        BLOCK_N=COMBINE_BLOCK, num_warps=4,
    )  # fmt: skip
    return y
