"""Host side of fp4.linear_fp8 on CUDA: the self-dispatching op. No synchronisation, current stream."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...ops import linear_fp8 as contract
from ...ops.linear import without_products
from .. import host
from . import configs
from .triton_gemv import linear_fp8_gemv


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto") -> Tensor:
    """``x [..., K]`` times the weight by the row that ``select.plan`` gives for this M."""
    contract.check(x, weight, weight_scale, bias, prefill)
    (n, k), lead = weight.shape, x.shape[:-1]
    m = math.prod(lead)
    if m == 0 or n == 0 or k == 0:
        return without_products(x, n, bias)
    row = host.row_for("linear_fp8", x, m, n, k, prefill)
    with torch.cuda.device(x.device):
        y = _LAUNCHERS[row.kernel](host.aligned(x.reshape(m, k)), host.aligned(weight), weight_scale.contiguous())
    return host.plus(y, bias).view(*lead, n)


def gemv(x: Tensor, weight: Tensor, weight_scale: Tensor, tile: configs.Fp8GemvConfig | None = None) -> Tensor:
    """``[M, N]``; every row of x reads the weight again."""
    (m, k), n = x.shape, weight.shape[0]
    c = tile or configs.gemv(n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.gemv_constants(c, n, k, host.arch(x.device))
    linear_fp8_gemv[(-(-n // c.block_n), m)](x, weight.view(torch.uint8), weight_scale, y, m, n, k, **constants, num_warps=c.num_warps, num_stages=2)
    return y


_LAUNCHERS: dict[str, Callable[..., Tensor]] = {"triton_gemv_fp8": gemv, "scaled_mm": contract.scaled, "cast + mm": contract.transient}
