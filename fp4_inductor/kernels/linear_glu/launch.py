"""Host side of fp4.linear_glu on CUDA: one kernel where a row of the table has one, else fp4.linear and a product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops import linear_glu as contract
from .. import csrc, host
from ..linear.configs import Epilogue, GemvConfig
from . import configs
from .triton_gemv import linear_glu_gemv


def linear_glu(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu", prefill: str = "auto") -> Tensor:
    """``act(gate) * up`` for ``x [..., K]`` by the row that ``select.plan`` gives for this M."""
    contract.check(x, qdata, scale, global_scale, bias, act, prefill)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    lead = x.shape[:-1]
    m = math.prod(lead)
    row = host.row_for("linear_glu", x, m, n, k, prefill) if m and n and k else None
    if row is not None and row.csrc:
        then = Epilogue(starts=(n // 2,) if global_scale.dim() else (), act=act)
        return csrc.call(row.csrc, x.reshape(m, k), (qdata, scale), global_scale, bias, host.arch(x.device), then=then).view(*lead, n // 2)
    if row is not None and row.kernel in _LAUNCHERS:
        with torch.cuda.device(x.device):
            bias = None if bias is None else host.aligned(bias)
            x, qdata, scale = host.aligned(x.reshape(m, k)), host.aligned(qdata), host.aligned(scale)
            return gemv(x, qdata, scale, global_scale, bias, act).view(*lead, n // 2)
    return contract.in_two_steps(x, qdata, scale, global_scale, bias, act, prefill)


def gemv(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, act: str, tile: GemvConfig | None = None) -> Tensor:
    """``[M, N / 2]``; every row of x reads the weight again."""
    (m, k), n = x.shape, qdata.shape[0] // 2
    c = tile or configs.gemv(n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.gemv_constants(c, n, k, host.arch(x.device), act, bias is not None, max(global_scale.numel(), 1))
    linear_glu_gemv[(-(-n // c.block_n), m)](
        x, qdata, scale.view(torch.uint8), global_scale, bias, y, m, n, k // 8, **constants, num_warps=c.num_warps, num_stages=2
    )
    return y


_LAUNCHERS = {"triton_gemv_glu": gemv}
