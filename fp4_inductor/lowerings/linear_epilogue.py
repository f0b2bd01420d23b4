"""fp4.linear_epilogue -> one CUDA kernel where a row of the table has one, else the lowering of fp4.linear and pointwise operations."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.forms import Epilogue, Norm
from ..kernels.select import plan
from ..ops.linear_glu import ACTIVATIONS
from ..passes.epilogue import MANY_ROWS
from . import linear
from . import norm as norms
from .journal import record
from .regime import decide, likely, refusals

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_epilogue.default, lower)
    inductor.register(fp4.norm_linear_epilogue.default, norms.in_front_of(lower))


def lower(x, qdata, scale, global_scale, bias=None, act="", mul=None, residual=None, prefill="auto", rows=None, norm: Norm | None = None):
    """Lowering of ``fp4.linear_epilogue``: x ``[..., K]`` -> ``[..., N]``; ``norm``: x is normalised first."""
    symbols = inductor.Symbols()
    n, half_k = map(symbols.static_int, qdata.get_size())
    m = inductor.rows_of(x)
    if n is None or half_k is None:
        x = norms.applied(x, norm)
        return inductor.call_op(fp4.linear_epilogue.default, x, qdata, scale, global_scale, bias, act, mul, residual, prefill, rows)
    options = plan(select.describe("linear_epilogue", x.get_device(), x.get_dtype(), n, half_k * 2, prefill), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    note = " ".join(filter(None, (act, "* mul" if mul is not None else "", "+ residual" if residual is not None else "")))
    # Where M is known at run time only, the operator would serve most of them by fp4.linear and unfused pointwise kernels.
    if m == 0 or n == 0 or half_k == 0 or decision.row is None or not decision.row.library or len(rows or ()) > MAX_SCALES:
        y = linear.lower(x, qdata, scale, global_scale, bias, prefill, rows, refused=refusals(options, decision), norm=norm)
        y = inductor.inline(_activation(act), (y,)) if act else y
        y = y if mul is None else inductor.mul(y, mul)
        if residual is None:
            return y
        y = inductor.add(y, residual)
        return inductor.realized(y) if likely(m, symbols, 0) >= MANY_ROWS else y
    several = f"{len(rows)} global scales" if len(rows or ()) > 1 else ""
    if not norms.takes_norm(decision.row):
        x, norm = norms.applied(x, norm), None
    entry = record(options, decision, m, note=linear.join(several, norms.remark(norm), f"in the kernel: {note}"))
    lead = x.get_size()[:-1]

    def flat(t):
        return t if t is None or len(lead) == 1 else inductor.view(t, [m, t.get_size()[-1]])

    then = Epilogue(starts=tuple(rows or ())[1:], act=act, mul=_dense(flat(mul)), residual=_dense(flat(residual)))
    y = linear.call_csrc(entry, decision.row.library, (flat(x),), (qdata, scale, global_scale), bias, options.call.arch, then, norm)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n])


def _activation(act: str):
    def activation(y):  # torch's own take further arguments
        return ACTIVATIONS[act](y)

    return activation


def _dense(t):
    return None if t is None else inductor.contiguous(t)
