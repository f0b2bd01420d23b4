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
    return gather(t, t.dim() - 1, group)
