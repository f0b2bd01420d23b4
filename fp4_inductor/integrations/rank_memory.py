"""Memory that the GPUs of a group share, made when a model is divided among them: in it a launch sums over the ranks (:mod:`fp4_inductor._exchange`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from ... import _exchange
from ..._torch.collectives import name_of, shared_zeros


def _why_never(device: torch.device, group: Any) -> str:
    """The same on every rank, because all or none make the memory."""
    ranks, backend = torch.distributed.get_world_size(group), torch.distributed.get_backend(group)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"one launch across ranks is for compute capability 9.0, the model is on {device}"
    if ranks > _exchange.MOST_RANKS or os.environ.get("LOCAL_WORLD_SIZE") != str(torch.distributed.get_world_size()) or torch.cuda.device_count() < ranks:
        return f"{ranks} ranks: one launch takes at most {_exchange.MOST_RANKS}, all on one machine, by torchrun, each of which sees the GPUs of the others"
    if "nccl" not in backend:
        return f"the group's backend is {backend}, not nccl"
    apart = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    return f"GPUs {apart[0]} cannot read each other's memory" if apart else ""


def join(group: Any, device: torch.device) -> str:
    """Make the memory of ``group``, if it has none; every rank has to call it. Returns why there is none; empty: there is."""
    name = name_of(group)
    if _exchange.has(name) and len(_exchange.of(name).addresses) == torch.distributed.get_world_size(group):
        return ""
    reason = _why_never(device, group)
    if not reason:
        memory, addresses, rank = shared_zeros(_exchange.size(torch.distributed.get_world_size(group)), device, group)
        _exchange.add(name, _exchange.Exchange(tuple(addresses), rank, memory))
    else:
        _exchange.refuse(name, reason)
    return reason
