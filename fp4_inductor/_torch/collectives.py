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
    from torch.distributed._functional_collectives import all_gather_tensor

    return all_gather_tensor(t, t.dim() - 1, group)
