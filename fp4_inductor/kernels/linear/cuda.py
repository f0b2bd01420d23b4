"""fp4.linear and fp4.linear_epilogue on CUDA: by the kernels that ``select.plan`` gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...formats.packing import MAX_SCALES
from ...ops import linear as contract
from ...ops import linear_epilogue as epilogue
from .. import csrc, host, run
from ..forms import Epilogue, Options


def linear(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    """``x [..., K] @ W.T + bias``."""
    contract.check(x, qdata, scale, global_scale, bias, prefill, rows)
    return run.product("linear", x, (qdata, scale, global_scale), bias, prefill, rows)


def linear_epilogue(c: epilogue.EpilogueCall) -> Tensor:
    """``act(x @ W.T + bias) * mul + residual`` for ``x [..., K]``: one kernel if one serves this M, else fp4.linear and pointwise operations."""
    epilogue.check(c)
    n, k = c.qdata.shape[0], c.qdata.shape[1] * 2
    lead = c.x.shape[:-1]
    m = math.prod(lead)
    row = host.row_for("linear_epilogue", c.x, m, n, k, c.prefill) if m and n and k else None
    if row is None or not row.csrc or len(c.rows or ()) > MAX_SCALES:
        return epilogue.in_steps(c)
    mul, residual = (None if t is None else t.reshape(m, n) for t in (c.mul, c.residual))
    then = Epilogue(starts=tuple(c.rows or ())[1:], act=c.act, mul=mul, residual=residual)
    y = csrc.call(row.csrc, c.x.reshape(m, k), (c.qdata, c.scale), c.global_scale.contiguous(), c.bias, host.arch(c.x.device), Options(then=then))
    return y.view(*lead, n)
