"""Tensors whose addresses do not change."""

from __future__ import annotations

import torch


def keep_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that ``tensor`` stays where it is: a CUDA graph then writes into it, and no graph takes it for an input that it has to copy."""
    torch._dynamo.mark_static_address(tensor)
