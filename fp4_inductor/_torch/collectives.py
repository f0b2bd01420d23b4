"""Collectives that torch.compile traces."""

from __future__ import annotations

from typing import Any

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
