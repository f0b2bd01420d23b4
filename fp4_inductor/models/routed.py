"""What a module of experts was fed with, and which of it each expert saw."""

from __future__ import annotations

import torch
from torch import Tensor

from .calibrate_experts import routed
from .plan import ExpertsTarget


class RoutedInputs:
    """The tokens of one module of experts over all batches, and whom each was routed to.

    ``hidden``: ``[rows, H]``, where the tokens are; ``dense``: the same rows in the dense model, if it ran beside; ``seen``: tokens of
    the layer.
    """

    def __init__(self, target: ExpertsTarget):
        self.target = target
        self.experts = target.module.get_parameter("down_proj").shape[0]
        self.seen = 0
        self._hidden: list[Tensor] = []
        self._dense: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in range(self.experts)]
        self._count = 0

    def add(self, values: list, before: list | None = None) -> None:
        """One call of the module: hidden states and routing; ``before``: of the same call in the dense model."""
        hidden = values[0].detach().flatten(0, -2)
        if hidden.shape[0] == 0:
            return
        for e, rows in routed(self.target, self.experts, hidden, values[1:]):
            self._rows[e].append(rows + self._count)
        self.seen += hidden.shape[0] // (self.experts if self.target.spec.dense else 1)
        self._count += hidden.shape[0]
        self._hidden.append(hidden)
        # A row of zeros was routed elsewhere in the dense model: nothing is known of what it would have been.
        if before is not None:
            dense = before[0].detach().flatten(0, -2)
            self._dense.append(torch.where((dense != 0).any(-1, keepdim=True), dense, hidden))

    @property
    def tokens(self) -> list[int]:
        """How many tokens each expert saw."""
        return [sum(map(len, rows)) for rows in self._rows]

    def inputs(self, e: int, needed: int = 0) -> tuple[Tensor, Tensor | None]:
        """``(hidden, the same in the dense model)`` ``[rows, H]`` of expert ``e``.

        An expert that saw fewer than ``needed`` tokens borrows as many of the layer's other tokens as it lacks, evenly spaced.
        """
        hidden, dense = self._joined()
        own = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        if self._rows[e]:
            own[torch.cat(self._rows[e])] = True
        chosen = own.nonzero().flatten()
        if len(chosen) < needed:
            others = (~own & (hidden != 0).any(-1)).nonzero().flatten()
            at = torch.linspace(0, len(others) - 1, min(needed - len(chosen), len(others)), device=hidden.device).round().long()
            chosen = torch.cat((chosen, others[at]))
        return hidden[chosen], None if dense is None else dense[chosen]

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden)]
            self._dense = [torch.cat(self._dense)] if self._dense else []
        return self._hidden[0], self._dense[0] if self._dense else None
