"""``fp4.router`` and ``fp4.norm_router`` on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import norm_router as normed_contract
from ...ops import router as contract
from ...ops.norm_linear import check
from .. import host
from ..kernel import Kernel
from . import cuda


def router(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False) -> tuple[Tensor, Tensor]:
    """By the kernel that serves so many tokens."""
    contract.check(x, weight, bias, k, form, dtype)
    return serve(x, weight, bias, k, form, dtype, early)


def serve(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False) -> tuple[Tensor, Tensor]:
    """:func:`router` of a call that ``contract.check`` accepts."""
    if not x.shape[0]:
        return x.new_empty((0, k), dtype=dtype), x.new_empty((0, k), dtype=torch.int64)
    *_, weights, ids = _kernel(x, weight).source()(x, weight, bias, k, form, dtype, early)
    return weights, ids


def norm_router(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """In one launch where the router takes one; else in two steps. ``rest``: the arguments of ``fp4.router`` behind x."""
    check("norm_router", x, norm_weight)
    weight, bias, k, form, dtype, *early = rest
    contract.check(x, weight, bias, k, form, dtype)
    if not x.shape[0] or _kernel(x, weight).name != cuda.NAME:
        return normed_contract.in_two_steps(x, norm_weight, eps, norm_offset, *rest)
    normed, weights, ids = cuda.launch(x, weight, bias, k, form, dtype, any(early), cuda.Norm(norm_weight, eps, norm_offset))
    return normed, weights, ids  # type: ignore[return-value]


def _kernel(x: Tensor, weight: Tensor) -> Kernel:
    return host.row_for("router", x, x.shape[0], *weight.shape).implementation
