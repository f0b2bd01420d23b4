"""What the passes leave as it is, for explain() and decisions(): one entry per weight or norm, noted while a graph is being compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from .._journal import LEFT_DENSE

DENSE, APART = "dequantized", "not part of a linear layer"


@dataclass(frozen=True)
class Missed:
    """A quantized weight that a graph dequantises, or a norm that is not a part of the linear layer behind it.

    Args:
        node: its name in the graph.
        shape: of the dense weight, or of what the norm gives, as text; sizes may be symbolic.
        reason: why no pass could keep the weight packed, or put the norm into the layer.
        what: what it is therefore, one of :data:`DENSE` and :data:`APART`.
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
