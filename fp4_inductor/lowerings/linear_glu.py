"""fp4.linear_glu -> one kernel where a row of the table has one, else the lowering of fp4.linear and pointwise operations."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.forms import Epilogue, Library, Norm, Options, Triton
from ..kernels.select import plan
from ..ops.linear_glu import glu
from . import forms, linear
from . import norm as norms
from .journal import record
from .regime import decide, refusals

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_glu.default, lower)
    inductor.register(fp4.norm_linear_glu.default, norms.in_front_of(lower))


def lower(x, qdata, scale, global_scale, bias=None, act="silu", prefill="auto", norm: Norm | None = None):
    """Lowering of ``fp4.linear_glu``: x ``[..., K]`` -> ``[..., N / 2]``; ``norm``: x is normalised first."""
    symbols = inductor.Symbols()
    n, half_k = map(symbols.static_int, qdata.get_size())
    m = inductor.rows_of(x)
    if n is None or half_k is None:
        return inductor.call_op(fp4.linear_glu.default, norms.applied(x, norm), qdata, scale, global_scale, bias, act, prefill)
    k = half_k * 2
    options = plan(select.describe("linear_glu", x.get_device(), x.get_dtype(), n, k, prefill), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    # Where M is known at run time only, the operator would serve most of them by fp4.linear and unfused pointwise kernels.
    row = decision.row
    form = row.implementation.form if row and m != 0 and n and k else None
    if not isinstance(form, Library | Triton):
        remarks = linear.Remarks(f"{act}(gate) * up is pointwise work behind it", refusals(options, decision))
        call = linear.Siblings(x, (qdata, scale, global_scale), bias, [0, n // 2, n // 2, n], prefill, remarks, norm)
        both = linear.merged(call)
        if both is None:
            return inductor.inline(_glu(act), linear.one_by_one(call))
        return inductor.remember(inductor.inline(_glu(act), linear.members(both, call.rows)), (both, act))
    if not norms.takes_norm(row):
        x, norm = norms.applied(x, norm), None
    entry = record(options, decision, m, note=linear.join(linear.together(), f"{act}(gate) * up", norms.remark(norm)))
    lead = x.get_size()[:-1]
    rows = x if len(lead) == 1 else inductor.view(x, [m, k])
    if isinstance(form, Library):
        then = Epilogue(starts=(n // 2,) if len(global_scale.get_size()) else (), act=act)
        y = linear.call_csrc(entry, form, (rows,), (qdata, scale, global_scale), bias, options.call.arch, Options(then=then, norm=norm))
    else:
        own = form.given(act, bias is not None, 2 if len(global_scale.get_size()) == 1 else 1)
        inputs = (rows, qdata, scale, global_scale, *(() if bias is None else (bias,)))
        y = forms.launched(own, inputs, forms.problem(rows, n // 2, k), m)
        entry.buffer = inductor.buffer_name(y)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n // 2])


def _glu(act):
    def linear_glu(gate, up):
        return glu(gate, up, act)

    return linear_glu
