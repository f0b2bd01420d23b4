"""What torch.compile is told of a tensor ahead of its first graph: that its address does not change, or that a size does."""

from __future__ import annotations

import torch


def keep_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that ``tensor`` stays where it is: a CUDA graph then writes into it, and no graph takes it for an input that it has to copy."""
    torch._dynamo.mark_static_address(tensor)


def may_vary(tensor: torch.Tensor, dim: int) -> None:
    """Tell torch.compile that later calls may have another size here: the first graph is for all sizes from 2 on, unless the code depends on them."""
    if tensor.shape[dim] > 1:  # a graph for one is a graph of its own in any case
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
