"""Is this operand of a matmul an NVFP4 weight, and which nodes hold its parts?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .._torch.fx import in_one_mutation_region
from . import idiom
from .layout import origin


@dataclass(frozen=True)
class Weight:
    """The parts of an NVFP4 weight, as nodes of the graph.

    Args:
        source: ``"dequantize"``, or ``"idiom"`` for another library's decoding.
        qdata, scale: ``[N, K/2]`` and ``[N, K/16]``, or with a leading ``[E]``.
        global_scale: float32 with one element per matrix; None for 1.
        divides: the global scale is stored as its reciprocal.
    """

    source: str
    qdata: Node
    scale: Node
    global_scale: Node | None
    divides: bool = False

    @property
    def per_matrix(self) -> bool:
        """A stack of weights, one per batch entry."""
        return self.qdata.meta["val"].dim() == 3


def weight_of(operand: Node, dtype: torch.dtype, reader: Node) -> Weight | None:
    """The weight ``[.., N, K]`` whose transpose ``[.., K, N]`` ``operand`` is; None if it is none.

    Args:
        operand: the right-hand side of ``reader``; a leading dimension may broadcast one weight over a batch.
        dtype: the dtype of the activations. The weight may be rounded to it once, or be exact float32.
        reader: the matmul.
    """
    weight, path = _dequantized(operand, dtype)
    if weight is None:
        weight, path = _decoded(operand, dtype)
    return weight if weight is not None and in_one_mutation_region([reader, *path]) else None


def _dequantized(operand: Node, dtype: torch.dtype) -> tuple[Weight | None, tuple[Node, ...]]:
    found = origin(operand)
    # dequantize(float32) then a conversion rounds once, as dequantize(dtype) does; by way of a third dtype it rounds twice.
    if found is None or not set(found.dtypes) <= {dtype, torch.float32}:
        return None, ()
    rank = found.root.meta["val"].dim()
    k_then_n = (rank - 1, rank - 2)
    if found.axes[-2:] != k_then_n or found.axes[:-2] not in ((), (None,), (0,)) or (rank == 3) != (found.axes[:-2] == (0,)):
        return None, ()
    qdata, scale, global_scale = found.root.args[:3]
    return Weight("dequantize", qdata, scale, global_scale), found.path  # type: ignore[arg-type]


def _decoded(operand: Node, dtype: torch.dtype) -> tuple[Weight | None, tuple[Node, ...]]:
    found = idiom.decoding_of(operand, dtype)
    if found is None:
        return None, ()
    return Weight("idiom", found.qdata, found.scale, found.global_scale, found.divides), found.path
