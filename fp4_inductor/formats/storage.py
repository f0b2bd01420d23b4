"""How a weight ``[..., N, K]`` lies in its component tensors. Tensors, modules and checkpoints derive every shape from this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

ROW = -1  # one element per row


class Part(NamedTuple):
    """One component tensor. ``k``: weights per element along the last dimension; 0: one element per matrix; :data:`ROW`: per row."""

    name: str
    dtype: torch.dtype
    k: int


@dataclass(frozen=True)
class Storage:
    """A format's components, the first of them ``[..., N, K / k]``.

    Args:
        name: as in checkpoints and reports.
        parts: in the order in which ops take them.
        k_multiple: K is a multiple of this, and a weight can be cut along K only there.
        bits_per_weight: in memory, without the global scale.
    """

    name: str
    parts: tuple[Part, ...]
    k_multiple: int
    bits_per_weight: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shape of each component of a weight of ``shape``."""
        return {part.name: self._shape(part, tuple(shape)) for part in self.parts}

    def _shape(self, part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
        if part.k == ROW:
            return shape[:-1]
        return (*shape[:-1], shape[-1] // part.k) if part.k else shape[:-2]

    def logical(self, first: Sequence[int]) -> tuple[int, ...]:
        """The weight's shape from that of the first component."""
        return (*first[:-1], first[-1] * self.parts[0].k)
