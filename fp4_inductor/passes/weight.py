"""Is this operand of a matmul an NVFP4 weight, dense or 2:4-sparse, and which nodes hold its parts?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from .._torch.fx import in_one_mutation_region
from . import idiom
from .layout import ROOTS, origin


@dataclass(frozen=True)
class Weight:
    """The parts of an NVFP4 weight, as nodes of the graph.

    Args:
        source: ``"dequantize"``, ``"sparse_dequantize"``, or ``"idiom"`` for another library's decoding.
        qdata, scale: ``[N, K/2]`` and ``[N, K/16]``, or with a leading ``[E]``. Of a 2:4-sparse weight ``qdata`` holds the values ``[N, K/4]``.
        global_scale: float32 with one element per matrix; None for 1.
        divides: the global scale is stored as its reciprocal.
        meta: ``[N, K/8]`` of a 2:4-sparse weight; None for a dense one.
    """

    source: str
    qdata: Node
    scale: Node
    global_scale: Node | None
    divides: bool = False
    meta: Node | None = None

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
    count = len(ROOTS[found.root.target].parts)  # type: ignore[index]
    if len(found.root.args) < count:
        return None, ()  # called with keywords
    *packed, scale, global_scale = cast("tuple[Node, ...]", found.root.args[:count])
    name = found.root.target._opname  # type: ignore[union-attr]
    return Weight(name, packed[0], scale, global_scale, meta=packed[1] if len(packed) == 2 else None), found.path


def _decoded(operand: Node, dtype: torch.dtype) -> tuple[Weight | None, tuple[Node, ...]]:
    found = idiom.decoding_of(operand, dtype)
    if found is None:
        return None, ()
    return Weight("idiom", found.qdata, found.scale, found.global_scale, found.divides), found.path
