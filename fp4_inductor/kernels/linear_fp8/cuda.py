"""fp4.linear_fp8 on CUDA: by the kernels that ``select.plan`` gives."""

from __future__ import annotations

from torch import Tensor

from ...ops import linear_fp8 as contract
from .. import run


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto") -> Tensor:
    """``x [..., K]`` times the weight."""
    contract.check(x, weight, weight_scale, bias, prefill)
    return run.product("linear_fp8", x, (weight, weight_scale.contiguous()), bias, prefill)
