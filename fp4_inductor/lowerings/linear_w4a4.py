"""fp4.linear_w4a4 -> block-scaled FP4 MMA where the GPU has it, else both operands dequantised."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.forms import Composed, Problem, Triton
from ..kernels.kernel import Span
from ..kernels.select import plan
from . import forms
from .journal import record
from .regime import Decision, likely

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_w4a4.default, lower)


def row_for(device: torch.device, dtype: torch.dtype, n: int, k: int) -> Span:
    """The row that serves a weight ``[n, k]``, whatever M is."""
    return plan(select.describe("linear_w4a4", device, dtype, n, k), dispatch_config()).rows[-1]


def lower(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype):
    """Lowering of ``fp4.linear_w4a4``: codes ``[M, K/2]`` -> ``[M, N]``."""
    symbols = inductor.Symbols()
    n, half_k = map(symbols.static_int, qdata.get_size())
    m = inductor.rows_of(x_qdata)
    x, weight = (x_qdata, x_scale, row_scale), (qdata, scale, global_scale)
    if n is None or half_k is None or m == 0 or n == 0 or half_k == 0:
        return inductor.call_op(fp4.linear_w4a4.default, *x, *weight, bias, dtype)
    device, k = qdata.get_device(), half_k * 2
    options = plan(select.describe("linear_w4a4", device, dtype, n, k), dispatch_config())
    record(options, Decision(options.rows[-1], "proven"), m)
    y = product(x, weight, Problem(0, n, k, select.arch_of(device), dtype), m)
    return y if bias is None else inductor.add(y, bias)


def product(x: tuple, weight: tuple, p: Problem, m):
    """IR of ``x @ W.T [m, n]`` from x's codes, scales and row scales."""
    form = row_for(weight[0].get_device(), p.dtype, p.n, p.k).implementation.form
    if isinstance(form, Composed):
        return forms.composed(form, x, weight, p)
    if isinstance(form, Triton):
        return forms.launched(form, (*x, *weight), p._replace(m=likely(m, inductor.Symbols(), form.likely)), m)
    return inductor.call_op(fp4.linear_w4a4.default, *x, *weight, None, p.dtype)  # a CPU, or a kernel with no form inside generated code
