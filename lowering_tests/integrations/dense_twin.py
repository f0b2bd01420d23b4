"""The dense model that a quantized one stands for."""

from __future__ import annotations

import copy

from torch import nn

from fp4_inductor.modules import FP4Linear


def dequantized(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in which every quantized linear layer is an ``nn.Linear`` with the dequantized weight."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, FP4Linear):
            dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=module.dtype)
            dense.weight.data = module.dequantize().clone()
            if module.bias is not None:
                dense.bias.data = module.bias.detach().clone()
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, dense)
    return twin
