"""fp4.linear_glu on CUDA: one kernel if one serves this M, else fp4.linear and a product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops import linear_glu as contract
from .. import csrc, host, run
from ..forms import Epilogue, Options, Problem, Triton
from . import gemv


def linear_glu(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu", prefill: str = "auto") -> Tensor:
    """``act(gate) * up`` for ``x [..., K]``."""
    contract.check(x, qdata, scale, global_scale, bias, act, prefill)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    lead = x.shape[:-1]
    m = math.prod(lead)
    row = host.row_for("linear_glu", x, m, n, k, prefill) if m and n and k else None
    if row is not None and row.csrc:
        then = Epilogue(starts=(n // 2,) if global_scale.dim() else (), act=act)
        y = csrc.call(row.csrc, x.reshape(m, k), (qdata, scale), global_scale, bias, host.arch(x.device), Options(then=then))
        return y.view(*lead, n // 2)
    if row is not None and isinstance(row.implementation.form, Triton):
        with torch.cuda.device(x.device):
            bias = None if bias is None else host.aligned(bias)
            return one_row(host.aligned(x.reshape(m, k)), host.aligned(qdata), host.aligned(scale), global_scale, bias, act).view(*lead, n // 2)
    return contract.in_two_steps(x, qdata, scale, global_scale, bias, act, prefill)


def one_row(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """``[M, N / 2]`` by :mod:`.gemv`; every row of x reads the weight again."""
    form = gemv.form(act, bias is not None, max(global_scale.numel(), 1))
    problem = Problem(x.shape[0], qdata.shape[0] // 2, x.shape[1], host.arch(x.device), x.dtype)
    return run.by_triton(form, (x, qdata, scale, global_scale, *(() if bias is None else (bias,))), problem)
