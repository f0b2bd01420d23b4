"""E[x^2] of the inputs of both products of every expert, from the calibration tokens that were routed to it.

An expert that no token reached has no statistics of its own: it gets the mean over all routed tokens of its layer, and the report
says how many experts that was. (A zero weight for every channel would let any scale win.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from .experts import ExpertsSpec
from .plan import ExpertsTarget

_ROWS = 4096  # tokens of one expert multiplied at once


@dataclass(frozen=True)
class Statistics:
    """float32 ``first [E, H]`` and ``down [E, I]``; ``notes`` for the report."""

    first: Tensor
    down: Tensor
    notes: tuple[str, ...] = ()


class ExpertsMeans:
    """Streaming sums of squares for one module of experts."""

    def __init__(self, target: ExpertsTarget):
        self.target = target
        self.experts = target.module.get_parameter("down_proj").shape[0]
        self.tokens = torch.zeros(self.experts, dtype=torch.float64)
        self.seen = 0  # tokens of the layer, whoever they were routed to
        self.first: Tensor | None = None
        self.down: Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.tokens.sum())

    def hook(self, order: dict[str, None]) -> Callable:
        """A forward pre-hook with keyword arguments."""

        def watch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            values = [*args, *kwargs.values()]
            hidden = values[0].detach().flatten(0, -2)
            if hidden.shape[0] == 0:
                return
            order[self.target.name] = None
            self.seen += hidden.shape[0] // (self.experts if self.target.spec.dense else 1)
            for e, token in routed(self.target, self.experts, hidden, values[1:]):
                for part in token.split(_ROWS):
                    self._add(module, e, hidden[part])

        return watch

    def result(self) -> Statistics | None:
        """None if no token came at all."""
        if self.first is None or self.down is None or not self.rows:
            return None
        empty = self.tokens == 0
        notes = (f"{int(empty.sum())} of {self.experts} experts without calibration tokens: the layer's mean",) if empty.any() else ()
        return Statistics(self._mean(self.first, empty), self._mean(self.down, empty), notes)

    def check_finite(self) -> bool:
        return all(t is None or bool(torch.isfinite(t).all()) for t in (self.first, self.down))

    def _mean(self, sums: Tensor, empty: Tensor) -> Tensor:
        own = sums / self.tokens.clamp_min(1).unsqueeze(1)
        return torch.where(empty.unsqueeze(1), sums.sum(0) / self.rows, own).float()

    def _add(self, module: nn.Module, e: int, x: Tensor) -> None:
        h = between(module, self.target.spec, e, x)
        wide = torch.zeros(self.experts, x.shape[1], dtype=torch.float64), torch.zeros(self.experts, h.shape[1], dtype=torch.float64)
        self.first, self.down = (new if old is None else old for old, new in zip((self.first, self.down), wide, strict=True))
        self.first[e] += x.float().square().sum(0).double().cpu()
        self.down[e] += h.square().sum(0).double().cpu()
        self.tokens[e] += x.shape[0]


def routed(target: ExpertsTarget, experts: int, hidden: Tensor, routing: list) -> Iterator[tuple[int, Tensor]]:
    """``(expert, rows of hidden)`` for each expert with tokens. A token routed to an expert twice counts once."""
    if target.spec.dense:
        blocks = (hidden != 0).any(-1).view(experts, -1)
        start = blocks.shape[1]
        yield from ((e, row.nonzero().flatten() + e * start) for e, row in enumerate(blocks) if bool(row.any()))
        return
    ids = next(r for r in routing if not r.is_floating_point())
    for e in torch.unique(ids).tolist():
        if 0 <= e < experts:
            yield e, (ids == e).any(-1).nonzero().flatten()


def between(module: nn.Module, spec: ExpertsSpec, e: int, x: Tensor, first: Tensor | None = None) -> Tensor:
    """float32 ``[rows, I]``: what expert ``e`` feeds its second product with, for ``x [rows, H]``.

    ``first``: another first weight ``[G, H]`` in place of the module's.
    """
    down = module.get_parameter("down_proj")[e]
    return spec.activation(first_product(module, spec, e, x, first), down.shape[0 if spec.transposed else 1])


def first_product(module: nn.Module, spec: ExpertsSpec, e: int, x: Tensor, first: Tensor | None = None) -> Tensor:
    """float32 ``[rows, G]``: what expert ``e`` feeds its activation with. Arguments as for :func:`between`."""
    if first is None:
        own = module.get_parameter(spec.first)[e].detach()
        first = own.t() if spec.transposed else own
    z = x.to(first.dtype) @ first.t()
    if spec.bias:
        z = z + module.get_parameter(f"{spec.first}_bias")[e].detach()
    return z.float()


def non_finite(names: list[str], reached: int) -> NonFiniteError:
    """The error for the first of ``names`` in execution order."""
    return NonFiniteError(
        f"calibration: the input of {names[0]} holds NaN or Inf (or its squares overflow float32)",
        value=f"{len(names)} of {reached} layers affected, the first in execution order is {names[0]}",
        limit="finite activations",
        remedy="Check the calibration batches, and the model in its dtype without quantization.",
    )
