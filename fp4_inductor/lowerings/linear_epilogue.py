"""fp4.linear_epilogue -> one CUDA kernel where a row of the table has one, else the lowering of fp4.linear and pointwise operations."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.forms import Epilogue, Norm, Options
from ..kernels.select import plan
from ..ops.linear_epilogue import EpilogueCall
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


def lower(*args, norm: Norm | None = None, **kwargs):
    """Lowering of ``fp4.linear_epilogue``: x ``[..., K]`` -> ``[..., N]``; ``norm``: x is normalised first."""
    c: Any = EpilogueCall.of(*args, **kwargs)  # of IR values
    symbols = inductor.Symbols()
    n, half_k = map(symbols.static_int, c.qdata.get_size())
    m = inductor.rows_of(c.x)
    if n is None or half_k is None:
        return inductor.call_op(fp4.linear_epilogue.default, *c._replace(x=norms.applied(c.x, norm)))
    options = plan(select.describe("linear_epilogue", c.x.get_device(), c.x.get_dtype(), n, half_k * 2, c.prefill), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    weight, rows = (c.qdata, c.scale, c.global_scale), c.rows or ()
    # Where M is known at run time only, the operator would serve most of them by fp4.linear and unfused pointwise kernels.
    if m == 0 or n == 0 or half_k == 0 or decision.row is None or not decision.row.library or len(rows) > MAX_SCALES:
        remarks = linear.Remarks(refused=refusals(options, decision) or linear.left_apart())
        y = linear.dense_product(linear.Product(c.x, weight, c.bias, c.prefill, c.rows, norm), remarks)
        y = inductor.inline(_activation(c.act), (y,)) if c.act else y
        y = y if c.mul is None else inductor.mul(y, c.mul)
        if c.residual is None:
            return y
        y = inductor.add(y, c.residual)
        return inductor.realized(y) if likely(m, symbols, 0) >= MANY_ROWS else y
    several = f"{len(rows)} global scales" if len(rows) > 1 else ""
    x = c.x
    if not norms.takes_norm(decision.row):
        x, norm = norms.applied(x, norm), None
    note = " ".join(filter(None, (c.act, "* mul" if c.mul is not None else "", "+ residual" if c.residual is not None else "")))
    entry = record(options, decision, m, note=linear.join(several, norms.remark(norm), f"in the kernel: {note}"))
    lead = x.get_size()[:-1]

    def flat(t):
        return t if t is None or len(lead) == 1 else inductor.view(t, [m, t.get_size()[-1]])

    then = Epilogue(starts=tuple(rows)[1:], act=c.act, mul=_dense(flat(c.mul)), residual=_dense(flat(c.residual)))
    y = linear.call_csrc(entry, decision.row.library, (flat(x),), weight, c.bias, options.call.arch, Options(then=then, norm=norm))
    return y if len(lead) == 1 else inductor.view(y, [*lead, n])


def _activation(act: str):
    def activation(y):  # torch's own take further arguments
        return ACTIVATIONS[act](y)

    return activation


def _dense(t):
    return None if t is None else inductor.contiguous(t)
