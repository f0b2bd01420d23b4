"""torch's tree utilities (not yet public)."""

from torch.utils._pytree import tree_map_only

__all__ = ["tree_map_only"]
