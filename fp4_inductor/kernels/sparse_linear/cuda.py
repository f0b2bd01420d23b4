"""fp4.sparse_linear on CUDA: by the kernels that ``select.plan`` gives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...ops import sparse_linear as contract
from .. import run


def sparse_linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``x [..., K] @ W.T + bias``."""
    contract.check(x, values, meta, scale, global_scale, bias, prefill, rows)
    return run.product("sparse_linear", x, (values, meta, scale, global_scale), bias, prefill, rows)
