"""What the passes leave as it is, for explain() and decisions(): one entry per weight or call, noted while a graph is being compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from .._journal import LEFT_DENSE


@dataclass(frozen=True)
class Missed:
    """A quantized weight that a graph dequantises, or a query that it norms and rotates by kernels of their own.

    Args:
        node: its name in the graph; of a query, that of the attention.
        shape: of the dense weight, or of the query, as text; sizes may be symbolic.
        reason: why no pass could keep it packed, or take norm and rotation into the attention.
        is_done: what the graph does.
    """

    node: str
    shape: str
    reason: str
    is_done: str = "dequantized"

    def __str__(self) -> str:
        return f"{self.node} {self.shape} is {self.is_done}: {self.reason}"


listen = LEFT_DENSE.listen


def missed(node: Node, dense: Tensor, reason: str) -> None:
    """Note ``node``."""
    LEFT_DENSE.record(Missed(node.name, str(list(dense.shape)), reason))


def apart(attention: Node, query: Tensor, reason: str) -> None:
    """Note a call of ``fp4.cached_attention`` in front of which norm and rotation stay."""
    LEFT_DENSE.record(Missed(attention.name, str(list(query.shape)), reason, "normed and rotated before fp4.cached_attention"))
