"""Transformers' experts interface, computed in parts: packed products, and the module's own functions between and behind them.

``fp4.moe`` is one op and knows six activations. A module whose gate is none of them (Inkling 2: both factors of its gate saturate), or that
normalises what each expert returns (MuseSpark), keeps its class. Its two weights are packed, and this is its implementation. Nothing is
assumed about what the module's functions compute.

Source: transformers.integrations.moe (5.17 to 5.24), ``batched_mm_experts_forward`` and ``grouped_mm_experts_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import cast_for_autocast
from ..ops.moe import used_experts

# Up to so many (token, expert) assignments the matrix of each is selected, and multiplied with its row in one call.
SELECTED = 32
# The name of a weight and rows [S, K] -> [S, N], bias included.
Product = Callable[[str, Tensor], Tensor]


def forward(module: Any, names: tuple[str, str], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Hidden ``[T, H]``, ids and weights ``[T, k]`` -> ``[T, H]``. An id outside of [0, E) contributes zero.

    Args:
        names: of the two weights, in the order in which they are used; both are FP4Tensor Parameters of ``module``.
    """
    hidden, _ = cast_for_autocast(hidden)
    experts = getattr(module, names[1]).shape[0]
    known = (ids >= 0) & (ids < experts)
    flat = torch.where(known, ids, experts).reshape(-1)
    rows = hidden.repeat_interleave(ids.shape[-1], 0)
    if ids.numel() <= SELECTED:
        y = _outputs(module, names, rows, _selected(module, flat.clamp(max=experts - 1)))
    elif torch.compiler.is_compiling():
        order = flat.argsort(stable=True)
        grouped = _outputs(module, names, rows[order], _grouped(module, flat[order], experts))
        y = torch.empty_like(grouped).index_copy(0, order, grouped)
    else:
        y = rows.new_zeros(rows.shape[0], getattr(module, names[1]).shape[2 if module.is_transposed else 1])
        for e in used_experts(torch.where(known, ids, -1)):
            mine = torch.where(flat == e)[0]
            y = y.index_copy(0, mine, _outputs(module, names, rows[mine], _of_expert(module, e)).to(y.dtype))
    y = y.view(*ids.shape, y.shape[-1]).float() * weights.unsqueeze(-1).float()
    return torch.where(known.unsqueeze(-1), y, 0.0).sum(1).to(hidden.dtype)


def _outputs(module: Any, names: tuple[str, str], rows: Tensor, product: Product) -> Tensor:
    first, down = names
    z = product(first, rows)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = product(down, h.to(rows.dtype))
    return module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y


def _selected(module: Any, ids: Tensor) -> Product:
    """Row i by the matrix of expert ``ids[i]``."""

    def product(name: str, x: Tensor) -> Tensor:
        w = getattr(module, name)
        w = (w.mT if module.is_transposed else w)[ids]
        y = w._bmm(x.unsqueeze(1)).squeeze(1)
        return y + getattr(module, f"{name}_bias")[ids].to(y.dtype) if module.has_bias else y

    return product


def _of_expert(module: Any, e: int) -> Product:
    """All rows by the matrix of one expert."""

    def product(name: str, x: Tensor) -> Tensor:
        w = getattr(module, name)[e]
        bias = getattr(module, f"{name}_bias")[e].to(x.dtype) if module.has_bias else None
        return F.linear(x, w.mT if module.is_transposed else w, bias)

    return product


def _grouped(module: Any, ids: Tensor, experts: int) -> Product:
    """Row i by the matrix of expert ``ids[i]``, ascending. In a graph, which cannot know who has tokens, all experts are decoded for one product."""
    from transformers.integrations.moe import _grouped_linear

    ends = (ids.unsqueeze(-1) <= torch.arange(experts, device=ids.device)).sum(0, dtype=torch.int32)
    index = ids.clamp(max=experts - 1)

    def product(name: str, x: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias")[index].to(x.dtype) if module.has_bias else None
        return _grouped_linear(x, getattr(module, name).dequantize(x.dtype), ends, bias, module.is_transposed)

    return product
