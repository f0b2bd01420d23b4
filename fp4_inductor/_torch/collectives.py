"""Collectives that torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def all_reduce(t: Tensor, group: Any) -> Tensor:
    """The sum of ``t`` over the ranks of ``group``, as a new tensor."""
    from torch.distributed._functional_collectives import all_reduce as functional

    return functional(t, "sum", group)


def all_gather(t: Tensor, group: Any) -> Tensor:
    """The tensors ``t`` of the ranks of ``group`` beside each other along the last dimension."""
    import torch.distributed._functional_collectives as functional

    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # its name before torch 2.13
    # Along the first dimension: for any other one torch 2.11 calls a function that Dynamo does not trace.
    return gather(t.unsqueeze(0), 0, group).movedim(0, -2).flatten(-2)


def functional_calls() -> tuple[Any, Any]:
    """The operators that :func:`all_reduce` puts into a graph: the sum ``(t, "sum", name of the group)``, and the wait for it."""
    ops = torch.ops._c10d_functional
    return ops.all_reduce.default, ops.wait_tensor.default


def sum_of_ranks(t: Tensor, group: str) -> Tensor:
    """:func:`all_reduce` inside of an operator, of a group by its name: a plain tensor. That of the other one, outside of a graph, has no address."""
    reduce, wait = functional_calls()
    return wait(reduce(t, "sum", group))


def name_of(group: Any) -> str:
    """By which the operators know ``group``."""
    return group if isinstance(group, str) else group.group_name


def sum_lowered(t: Any, group: str) -> Any:
    """IR of the sum of ``t`` over the ranks of ``group``, while a graph is lowered."""
    from torch._inductor.lowering import lowerings

    reduce, wait = functional_calls()
    return lowerings[wait](lowerings[reduce](t, "sum", group))


def shared_zeros(count: int, device: torch.device, group: Any) -> tuple[Tensor, list[int], int]:
    """``count`` bytes of zeros on each rank's device that all ranks of ``group`` can write to: a tensor that keeps them, the address of each rank's as this
    one reaches it, and the number of this rank. Every rank has to call it, and may write when all have come back."""
    import torch.distributed._symmetric_memory as symmetric

    t = symmetric.empty(count, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(t, group)
    t.zero_()
    torch.cuda.synchronize(device)
    return t, list(handle.buffer_ptrs), handle.rank
