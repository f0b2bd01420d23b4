"""What a module of experts was fed with, and which of it each expert saw."""

from __future__ import annotations

import torch
from torch import Tensor

from .calibrate_experts import routed
from .expert_gradients import PairWeights
from .plan import ExpertsTarget


def input_norms(x: Tensor) -> Tensor:
    """float32 ``[rows]``: ``min(1, median|x|^2 / |x|^2)`` of the rows of ``x [..., K]``."""
    squares = x.detach().reshape(-1, x.shape[-1]).float().square().sum(-1)
    return (squares.median() / squares.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=1.0)


class RoutedInputs:
    """The tokens of one module of experts over all batches, and whom each was routed to.

    ``hidden``: ``[rows, H]``, where the tokens are; ``dense``: the same rows in the dense model, if it ran beside; ``seen``: tokens of
    the layer.

    Args:
        weighted: tokens have weights: those that are added, or by the norm of their inputs where there are none.
    """

    def __init__(self, target: ExpertsTarget, weighted: bool = False):
        self.target = target
        self.weighted = weighted
        self.experts = target.module.get_parameter("down_proj").shape[0]
        self.seen = 0
        self._hidden: list[Tensor] = []
        self._dense: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in range(self.experts)]
        self._weights: list[list[Tensor]] = [[] for _ in range(self.experts)]
        self._count = 0

    def add(self, values: list, before: list | None = None, weights: PairWeights | None = None) -> None:
        """One call of the module: hidden states and routing; ``before``: of the same call in the dense model; ``weights`` of its tokens."""
        hidden = values[0].detach().flatten(0, -2)
        if hidden.shape[0] == 0:
            return
        for e, rows in routed(self.target, self.experts, hidden, values[1:]):
            self._rows[e].append(rows + self._count)
            if weights is not None:
                self._weights[e].append(weights.of(e, rows))
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

    def weights(self, e: int, product: int, x: Tensor) -> Tensor | None:
        """float32 ``[rows]`` of the tokens that :meth:`inputs` gave for expert ``e``, 1 on average; None if tokens have no weights.

        Tokens of which nothing is known, because they were borrowed or went elsewhere in the dense model, weigh as the others on average.

        Args:
            product: 0 or 1.
            x: what that product is fed with, for a layer whose weights were not found.
        """
        if not self.weighted:
            return None
        if len(self._weights[e]) != len(self._rows[e]):
            return input_norms(x)
        known = torch.cat([w[product] for w in self._weights[e]]).to(x.device) if self._weights[e] else x.new_zeros(0, dtype=torch.float32)
        mean = known.nanmean()
        if not bool(mean > 0):  # no token, or none that matters
            return torch.ones(len(x), device=x.device)
        known = (known / mean).nan_to_num(nan=1.0)
        return torch.cat((known, known.new_ones(len(x) - len(known))))

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden)]
            self._dense = [torch.cat(self._dense)] if self._dense else []
        return self._hidden[0], self._dense[0] if self._dense else None
