"""What the passes leave as it is, for explain() and decisions(): one entry per weight, norm, query, product or cache, noted while a graph is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from .._journal import LEFT_DENSE

DENSE, APART, BEFORE_ATTENTION = "dequantized", "not part of a linear layer", "normed and rotated before fp4.cached_attention"
UNCHAINED = "not one launch with the products behind it"
DEQUANTIZED_CACHE = "keys that are dequantized before attention"

# How explain() calls what was left, and several of them.
SPOKEN = {
    DENSE: ("left dense", "weights"),
    APART: ("left apart", "norms"),
    BEFORE_ATTENTION: ("left apart", "queries"),
    UNCHAINED: ("left apart", "products"),
    DEQUANTIZED_CACHE: ("left dense", "caches"),
}


@dataclass(frozen=True)
class Missed:
    """A quantized weight or cache that a graph dequantizes, or a norm, a norm and rotation of a query, or a linear product, that runs as kernels of its own.

    Args:
        node: its name in the graph; of a query or a cache, that of the attention.
        shape: of the dense weight or keys, of what the norm or the product gives, or of the query, as text; sizes may be symbolic.
        reason: why no pass could keep the weight or the cache packed, put the norm into the layer or into the attention, or join the product with others.
        what: what it is therefore, one of the keys of ``SPOKEN``.
    """

    node: str
    shape: str
    reason: str
    what: str = DENSE

    def __str__(self) -> str:
        return f"{self.node} {self.shape} is {self.what}: {self.reason}"


listen = LEFT_DENSE.listen


def missed(node: Node, dense: Tensor, reason: str, what: str = DENSE) -> None:
    """Note ``node``."""
    LEFT_DENSE.record(Missed(node.name, str(list(dense.shape)), reason, what))
