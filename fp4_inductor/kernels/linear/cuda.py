"""fp4.linear and fp4.linear_epilogue on CUDA: by the kernels that ``select.plan`` gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...formats.packing import MAX_SCALES
from ...ops import linear as contract
from ...ops import linear_epilogue as epilogue
from .. import csrc, host, run
from ..forms import Epilogue


def linear(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    """``x [..., K] @ W.T + bias``."""
    contract.check(x, qdata, scale, global_scale, bias, prefill, rows)
    return run.product("linear", x, (qdata, scale, global_scale), bias, prefill, rows)


def linear_epilogue(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "", mul: Tensor | None = None,
    residual: Tensor | None = None, prefill: str = "auto", members: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``act(x @ W.T + bias) * mul + residual`` for ``x [..., K]``: one kernel if one serves this M, else fp4.linear and pointwise operations."""
    epilogue.check(x, qdata, scale, global_scale, bias, act, mul, residual, prefill, members)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    lead = x.shape[:-1]
    m = math.prod(lead)
    row = host.row_for("linear_epilogue", x, m, n, k, prefill) if m and n and k else None
    if row is None or not row.csrc or len(members or ()) > MAX_SCALES:
        return epilogue.in_steps(x, qdata, scale, global_scale, bias, act, mul, residual, prefill, members)
    mul, residual = (None if t is None else t.reshape(m, n) for t in (mul, residual))
    then = Epilogue(starts=tuple(members or ())[1:], act=act, mul=mul, residual=residual)
    return csrc.call(row.csrc, x.reshape(m, k), (qdata, scale), global_scale.contiguous(), bias, host.arch(x.device), then=then).view(*lead, n)
