"""The second door to FP4 experts: a model that keeps its own expert classes, with FP4Tensor Parameters in them."""

from __future__ import annotations

import torch

from fp4_inductor.modules import FP4Experts


def as_parameters(dense, model):
    """``dense`` with the weights of ``model``'s FP4Experts as Parameters of its own expert classes."""
    for name, m in model.named_modules():
        if isinstance(m, FP4Experts):
            own = dense.get_submodule(name)
            for part in (m.first_name, "down_proj"):
                w = m.get_submodule(part).weight
                setattr(own, part, torch.nn.Parameter(w.mT if own.is_transposed else w, requires_grad=False))
    return dense
