"""Memory that the GPUs of a group share, made when a model is divided among them: in it a launch sums over the ranks (:mod:`fp4_inductor._exchange`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import _exchange
from .._torch.collectives import name_of, shared_zeros


def _of_torchrun(device: torch.device, group: Any) -> str:
    """Why torchrun's ranks of ``group`` cannot reach each other's memory; empty: they can. The same on every rank."""
    ranks = torch.distributed.get_world_size(group)
    if os.environ.get("LOCAL_WORLD_SIZE") != str(torch.distributed.get_world_size()) or torch.cuda.device_count() < ranks:
        return f"{ranks} ranks are not all on one machine, by torchrun, each of which sees the GPUs of the others"
    apart = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    return f"GPUs {apart[0]} cannot read each other's memory" if apart else ""


def _why_never(device: torch.device, group: Any) -> str:
    """The same on every rank where all have GPUs of one kind."""
    ranks, backend = torch.distributed.get_world_size(group), torch.distributed.get_backend(group)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"one launch across ranks is for compute capability 9.0, the model is on {device}"
    if ranks > _exchange.MOST_RANKS:
        return f"{ranks} ranks: one launch takes at most {_exchange.MOST_RANKS}"
    return "" if "nccl" in backend else f"the group's backend is {backend}, not nccl"


def join(group: Any, device: torch.device) -> str:
    """Make the memory of ``group``, if it has none, for ranks that torchrun has started; every rank has to call it.

    Returns:
        Why there is none; empty: there is.
    """
    name = name_of(group)
    if _exchange.has(name) and len(_exchange.of(name).addresses) == torch.distributed.get_world_size(group):
        return ""
    reason = _why_never(device, group) or _of_torchrun(device, group)
    made = None if reason else _made(device, group)
    if made is not None:
        torch.distributed.barrier(group, device_ids=[device.index])  # nobody writes to memory that is not zeros yet
    return _told(name, made, reason)


def join_or_agree(group: Any, device: torch.device, cpu_group: Any, apart: str = "") -> str:
    """Make the memory of ``group``; every rank has to call it once. A rank that cannot leaves all of them without, and none raises or waits for it.

    Args:
        cpu_group: of the same ranks, over which they tell each other whether they can.
        apart: why this rank does not reach the others' memory; empty: it does.

    Returns:
        Why there is none, on every rank the same; empty: there is.
    """
    made, reason = None, _agreed(_why_never(device, group) or apart, cpu_group)
    if not reason:
        try:
            made = _made(device, group)
        except Exception as error:  # of the driver, of torch, of a container that keeps processes apart: the others have to hear of it
            reason = f"torch made no memory that the ranks share ({type(error).__name__}: {error})"
        reason = _agreed(reason, cpu_group)  # and nobody writes to memory that is not zeros yet
    return _told(name_of(group), made, reason)


def _told(name: str, made: _exchange.Exchange | None, reason: str) -> str:
    """Let launches find the memory of a group, or hear why there is none; returns ``reason``."""
    if made is None or reason:
        _exchange.refuse(name, reason)
    else:
        _exchange.add(name, made)
    return reason


def _made(device: torch.device, group: Any) -> _exchange.Exchange:
    memory, addresses, rank = shared_zeros(_exchange.size(torch.distributed.get_world_size(group)), device, group)
    return _exchange.Exchange(tuple(addresses), rank, memory)


def _agreed(reason: str, cpu_group: Any) -> str:
    """The reason of the first rank that has one; empty: none has. Returns when every rank has called it."""
    reasons: list[Any] = [None] * torch.distributed.get_world_size(cpu_group)
    torch.distributed.all_gather_object(reasons, reason, group=cpu_group)
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
