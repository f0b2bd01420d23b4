"""What torch.compile is told of a tensor ahead of its first graph: that its address does not change, or that a size does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def keep_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that ``tensor`` stays where it is: a CUDA graph then writes into it, and no graph takes it for an input that it has to copy."""
    torch._dynamo.mark_static_address(tensor)


def may_vary(tensor: torch.Tensor, dim: int) -> None:
    """Tell torch.compile that later calls may have another size here: the first graph is for all sizes from 2 on, unless the code depends on them."""
    if tensor.shape[dim] > 1:  # a graph for one is a graph of its own in any case
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def tokens_may_vary(arguments: Any, tokens: int) -> None:
    """:func:`may_vary` of dimension 1 of each tensor ``[B, tokens, ...]`` in ``arguments``, lists and dictionaries of tensors too."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[1] == tokens:
            may_vary(tensor, 1)
