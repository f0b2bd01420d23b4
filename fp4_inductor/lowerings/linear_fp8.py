"""fp4.linear_fp8 -> the GEMV template for one row, plain operations for more."""

from __future__ import annotations

import functools

import torch

from .._torch import lowering as inductor
from .._torch.template import Template
from ..config import dispatch_config
from ..kernels import select
from ..kernels.linear_fp8 import configs
from ..kernels.select import plan
from ..ops.dequantize_fp8 import rowwise_product
from ..ops.linear_fp8 import transient
from .journal import record
from .quantize_rows import quantized_rows
from .regime import decide

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_fp8.default, lower)


def lower(x, weight, weight_scale, bias=None, prefill="auto"):
    """Lowering of ``fp4.linear_fp8``: x ``[..., K]`` -> ``[..., N]``."""
    symbols = inductor.Symbols()
    n, k = map(symbols.static_int, weight.get_size())
    m = inductor.rows_of(x)
    if n is None or k is None or m == 0 or n == 0 or k == 0:
        return inductor.call_op(fp4.linear_fp8.default, x, weight, weight_scale, bias, prefill)
    options = plan(select.describe("linear_fp8", x.get_device(), x.get_dtype(), n, k, prefill), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    entry = record(options, decision, m)
    if decision.row is None or decision.row.kernel not in _LOWER:
        return inductor.call_op(fp4.linear_fp8.default, x, weight, weight_scale, bias, prefill)
    lead = x.get_size()[:-1]
    rows = x if len(lead) == 1 else inductor.view(x, [m, k])
    y = _LOWER[decision.row.kernel](rows, weight, weight_scale, m, n, k)
    entry.buffer = inductor.buffer_name(y)
    if bias is not None:
        y = inductor.add(y, bias)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n])


@functools.cache
def _template() -> Template:
    from ..kernels.linear_fp8 import triton_gemv as t

    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("WEIGHT", 0)}}', "K": '{{size("WEIGHT", 1)}}'}
    return Template("fp4_linear_fp8_gemv", t.linear_fp8_gemv, ("X", "WEIGHT", "WEIGHT_SCALE"), sizes, (t.decode_e4m3,), _grid)


def _grid(m, n, meta, *, cdiv):
    return (cdiv(n, meta["BLOCK_N"]), m, 1)


def _gemv(x, weight, weight_scale, m, n, k):
    tiles = configs.gemv_choices(n, k) if inductor.max_autotune() else [configs.gemv(n, k)]
    arch = select.arch_of(x.get_device())
    options = [dict(configs.gemv_constants(c, n, k, arch), num_warps=c.num_warps, num_stages=2) for c in tiles]
    return _template().lower(tuple(inductor.contiguous(t) for t in (x, weight, weight_scale)), [m, n], x.get_dtype(), options)


def _scaled(x, weight, weight_scale, m, n, k):
    dtype = x.get_dtype()

    def linear_fp8(x8, x_scale, weight, weight_scale):
        return rowwise_product(x8, x_scale, weight, weight_scale.unsqueeze(0), dtype)

    return inductor.inline(linear_fp8, (*quantized_rows(x), weight, weight_scale))


def _transient(x, weight, weight_scale, m, n, k):
    return inductor.inline(transient, (x, weight, weight_scale))


_LOWER = {"triton_gemv_fp8": _gemv, "scaled_mm": _scaled, "cast + mm": _transient}
