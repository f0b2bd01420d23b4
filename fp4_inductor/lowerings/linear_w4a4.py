"""fp4.linear_w4a4 -> block-scaled FP4 MMA where the GPU has it, else both operands dequantised."""

from __future__ import annotations

import functools

import torch

from .._torch import lowering as inductor
from .._torch.template import Template
from ..config import dispatch_config
from ..kernels import select
from ..kernels.kernel import Span
from ..kernels.linear.configs import scale_bounds
from ..kernels.linear_w4a4 import configs
from ..kernels.select import plan
from ..ops.linear_w4a4 import dequantized
from ..ops.members import row_scales
from .journal import record
from .regime import Decision
from .regime import likely as likely_rows
from .templates import arguments, mid_grid

fp4 = torch.ops.fp4
HINT = 2048


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
    y = product(x, weight, dtype, m, n, k)
    return y if bias is None else inductor.add(y, bias)


def product(x: tuple, weight: tuple, dtype: torch.dtype, m, n: int, k: int, bounds=()):
    """IR of ``x @ W.T [m, n]`` from x's codes, scales and row scales. ``bounds``: the rows at which the second and the third global scale begin."""
    device = weight[0].get_device()
    row = row_for(device, dtype, n, k)
    if row.kernel == "dequantize both + mm":

        def both_dequantized(x_qdata, x_scale, row_scale, qdata, scale, global_scale):
            return dequantized(x_qdata, x_scale, row_scale, qdata, scale, row_scales(global_scale, (0, *bounds), n) if bounds else global_scale, None, dtype)

        return inductor.inline(both_dequantized, (*x, *weight))
    if row.kernel != "triton_w4a4":  # a CPU, or a kernel with no form inside generated code
        return inductor.call_op(fp4.linear_w4a4.default, *x, *weight, None, dtype)
    likely = likely_rows(m, inductor.Symbols(), HINT)
    tiles = configs.choices(likely, n, select.arch_of(device))
    members = scale_bounds(bounds)
    options = [dict(configs.constants(c, k, members), num_warps=c.num_warps, num_stages=c.num_stages) for c in tiles[: None if inductor.max_autotune() else 1]]
    return _template().lower(arguments(*x, *weight), [m, n], dtype, options)


@functools.cache
def _template() -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear.triton_mid import tile_of
    from ..kernels.linear_w4a4 import triton_block_scaled as t

    inputs = ("X", "X_SCALE", "ROW_SCALE", "QDATA", "SCALE", "GLOBAL_SCALE")
    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("QDATA", 0)}}', "K": '{{size("QDATA", 1)}} * 2'}
    helpers = (common.e2m1_to_f16, common.e4m3_to_f32, common.global_scale_of, tile_of, t.block_values)
    return Template("fp4_linear_w4a4", t.linear_w4a4, inputs, sizes, helpers, mid_grid)
