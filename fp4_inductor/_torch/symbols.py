"""What is known of a size while a graph is traced."""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["likely", "statically_known_true"]


def likely(size: int | torch.SymInt, fallback: int) -> int:
    """A likely value of ``size``, ``fallback`` where none is known; no guard."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else fallback
    return size
