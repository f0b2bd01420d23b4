"""How much each token matters at both products of each expert that it was routed to: squared gradients, from the gradient of the layer's output.

A module of experts is one module, whose products autograd does not show by themselves. Its output is ``sum_e r[t, e] (D_e h[t, e] + b_e)``
with routing weights r, so the gradient at the output of ``D_e`` is that of the module's output times ``r[t, e]``, and the one at the output
of the first product follows by ``D_e`` and the derivative of the activation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .calibrate_experts import first_product, routed
from .plan import ExpertsTarget


@dataclass(frozen=True)
class PairWeights:
    """Of one call of a module of experts.

    Args:
        ids: int64 ``[rows, k]``: to which experts each row went.
        first, down: float32 ``[rows, k]``: squared gradients at the outputs of both products. A row that went to an expert twice has them
            once, the other is 0.
    """

    ids: Tensor
    first: Tensor
    down: Tensor

    def of(self, e: int, rows: Tensor) -> Tensor:
        """float32 ``[2, rows]`` of expert ``e`` for the first and the second product; NaN for rows that did not go there."""
        here = self.ids[rows] == e
        found = torch.stack([(v[rows] * here).sum(-1) for v in (self.first, self.down)])
        return torch.where(here.any(-1), found, torch.nan)


def assignments(target: ExpertsTarget, experts: int, hidden: Tensor, routing: list) -> tuple[Tensor, Tensor] | None:
    """``(ids, routing weights)`` ``[rows, k]`` of a call with ``hidden [rows, H]``; None where no routing weights are found."""
    if target.spec.dense:
        ids = torch.arange(len(hidden), device=hidden.device) // max(1, len(hidden) // experts)
        return ids[:, None], torch.ones_like(ids[:, None], dtype=torch.float32)
    ids = next(r for r in routing if not r.is_floating_point())
    weights = next((r for r in routing if r.is_floating_point() and r.shape == ids.shape), None)
    return None if weights is None else (ids.long(), weights.detach().float())


def squared_gradients(target: ExpertsTarget, values: list, gradient: Tensor) -> PairWeights | None:
    """Of one call with the arguments ``values``, for the gradient of its output; None where no routing weights are found."""
    module, spec = target.module, target.spec
    hidden, gradient = values[0].detach().flatten(0, -2), gradient.detach().flatten(0, -2)
    stack = module.get_parameter("down_proj")
    found = assignments(target, stack.shape[0], hidden, values[1:])
    if found is None:
        return None
    ids, weights = found
    first, down = torch.zeros_like(weights), torch.zeros_like(weights)
    for e, rows in routed(target, stack.shape[0], hidden, values[1:]):
        here = ids[rows] == e
        outer = gradient[rows].float() * (weights[rows] * here).sum(-1, keepdim=True)
        w = stack[e].detach().float()
        inner = outer @ (w.mT if spec.transposed else w)
        with torch.enable_grad():
            z = first_product(module, spec, e, hidden[rows]).detach().requires_grad_()
            (at_first,) = torch.autograd.grad(spec.activation(z, inner.shape[-1]), z, inner)
        slot = here.int().argmax(-1)
        first[rows, slot], down[rows, slot] = at_first.square().sum(-1), outer.square().sum(-1)
    return PairWeights(ids, first, down)
