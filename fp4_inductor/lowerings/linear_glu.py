"""fp4.linear_glu -> one kernel where a row of the table has one, else the lowering of fp4.linear and pointwise operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._torch import lowering as inductor
from .._torch.template import Template
from ..config import dispatch_config
from ..kernels import select
from ..kernels.linear.configs import Epilogue
from ..kernels.linear_glu import configs
from ..kernels.select import plan
from ..ops.linear_glu import glu
from . import linear
from .journal import record
from .regime import decide, refusals

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_glu.default, lower)


def lower(x, qdata, scale, global_scale, bias=None, act="silu", prefill="auto"):
    """Lowering of ``fp4.linear_glu``: x ``[..., K]`` -> ``[..., N / 2]``."""
    symbols = inductor.Symbols()
    n, half_k = map(symbols.static_int, qdata.get_size())
    m = inductor.rows_of(x)
    if n is None or half_k is None:
        return inductor.call_op(fp4.linear_glu.default, x, qdata, scale, global_scale, bias, act, prefill)
    k = half_k * 2
    options = plan(select.describe("linear_glu", x.get_device(), x.get_dtype(), n, k, prefill), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    # Where M is known at run time only, the operator would serve most of them by fp4.linear and unfused pointwise kernels.
    row = decision.row
    if m == 0 or n == 0 or k == 0 or row is None or not (row.csrc or row.kernel in _LOWER):
        note = f"{act}(gate) * up is pointwise work behind it"
        rows = [0, n // 2, n // 2, n]
        call = (x, qdata, scale, global_scale, bias, rows, prefill, note, refusals(options, decision))
        both = linear.merged(*call)
        if both is None:
            return inductor.inline(_glu(act), linear.one_by_one(*call))
        return inductor.remember(inductor.inline(_glu(act), linear.members(both, rows)), (both, act))
    entry = record(options, decision, m, note=linear.join(linear.together(), f"{act}(gate) * up"))
    lead = x.get_size()[:-1]
    rows = x if len(lead) == 1 else inductor.view(x, [m, k])
    if row.csrc:
        then = Epilogue(starts=(n // 2,) if len(global_scale.get_size()) else (), act=act)
        y = linear.call_csrc(entry, row.csrc, (rows,), (qdata, scale, global_scale), bias, options.call.arch, then)
    else:
        y = _LOWER[row.kernel](rows, qdata, scale, global_scale, bias, act, m, n // 2, k)
        entry.buffer = inductor.buffer_name(y)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n // 2])


def _glu(act):
    def linear_glu(gate, up):
        return glu(gate, up, act)

    return linear_glu


@functools.cache
def _template(has_bias: bool) -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear import triton_gemv as t
    from ..kernels.linear_glu import triton_gemv as g

    helpers = (common.e4m3_to_f32, t.decode8, t.half2_dot, t.dot8, t.pack_half2, t.load_activations, t.partial_sums, g.activate)
    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("QDATA", 0)}} // 2', "K8": '{{size("QDATA", 1)}} // 4'}
    inputs = ("X", "QDATA", "SCALE", "GLOBAL_SCALE", *(("BIAS",) if has_bias else ()))
    return Template(f"fp4_linear_glu_gemv{'_bias' if has_bias else ''}", g.linear_glu_gemv, inputs, sizes, helpers, _grid)


def _grid(m, n, meta, *, cdiv):
    return (cdiv(n, meta["BLOCK_N"]), m, 1)


def _gemv(x, qdata, scale, global_scale, bias, act, m, n, k):
    tiles = configs.gemv_choices(n, k) if inductor.max_autotune() else [configs.gemv(n, k)]
    arch, scales = select.arch_of(x.get_device()), 2 if len(global_scale.get_size()) == 1 else 1
    options = [dict(configs.gemv_constants(c, n, k, arch, act, bias is not None, scales), num_warps=c.num_warps, num_stages=2) for c in tiles]
    arguments = [inductor.contiguous(t) for t in (x, qdata, scale, global_scale, *(() if bias is None else (bias,)))]
    return _template(bias is not None).lower(tuple(arguments), [m, n], x.get_dtype(), options)


_LOWER: dict[str, Callable[..., Any]] = {"triton_gemv_glu": _gemv}
