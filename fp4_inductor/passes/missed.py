"""What the passes leave dense, for explain() and decisions(): one entry per weight, noted while a graph is being compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from .._journal import LEFT_DENSE


@dataclass(frozen=True)
class Missed:
    """A quantized weight that a graph dequantises.

    Args:
        node: its name in the graph.
        shape: of the dense weight, as text; sizes may be symbolic.
        reason: why no pass could keep it packed.
    """

    node: str
    shape: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} {self.shape} is dequantized: {self.reason}"


listen = LEFT_DENSE.listen


def missed(node: Node, dense: Tensor, reason: str) -> None:
    """Note ``node``."""
    LEFT_DENSE.record(Missed(node.name, str(list(dense.shape)), reason))
