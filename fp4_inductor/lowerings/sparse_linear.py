"""fp4.sparse_linear -> the kernel of one regime, by the same machinery as fp4.linear."""

from __future__ import annotations

import functools

import torch

from .._torch import lowering as inductor
from .._torch.template import Template
from ..formats import sparse24
from ..kernels import select
from ..kernels.kernel import Span
from ..kernels.sparse_linear import configs
from ..ops.dequantize_fp8 import scaled_product
from ..ops.sparse_dequantize import sparse_dequantize_rows
from . import linear
from .quantize_rows import quantized_rows
from .regime import likely as likely_rows
from .templates import arguments, gemv_grid, mid_grid

fp4 = torch.ops.fp4
_INPUTS = ("X", "VALUES", "META", "SCALE", "GLOBAL_SCALE")


def register() -> None:
    inductor.register(fp4.sparse_linear.default, lower)


def lower(x, values, meta, scale, global_scale, bias=None, prefill="auto", rows=None):
    """Lowering of ``fp4.sparse_linear``: x ``[..., K]`` -> ``[..., N]``."""
    return linear.product(fp4.sparse_linear.default, sparse24.STORAGE, x, (values, meta, scale, global_scale), bias, prefill, LOWER, begin=rows)


@functools.cache
def _gemv_template() -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear import triton_gemv as dense
    from ..kernels.sparse_linear import triton_gemv as t

    helpers = (
        common.global_scale_of,
        common.e4m3_to_f32, dense.half2_dot, dense.dot8, dense.pack_half2, t.decode_kept, t.kept_pair, t.gather_kept, t.kept_halves, t.load_blocks, t.kept_dot
    )  # fmt: skip
    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("VALUES", 0)}}', "B": '{{size("SCALE", 1)}}'}
    return Template("fp4_sparse_linear_gemv", t.sparse_gemv, _INPUTS, sizes, helpers, gemv_grid)


def _gemv(row: Span, x, values, meta, scale, global_scale, m, n, k, bounds=()):
    tiles = configs.gemv_choices(n, k) if inductor.max_autotune() else [configs.gemv(n, k)]
    arch = select.arch_of(x.get_device())
    options = [dict(configs.gemv_constants(c, n, k, arch, bounds), num_warps=c.num_warps, num_stages=2) for c in tiles]
    return _gemv_template().lower(arguments(x, values, meta, scale, global_scale), [m, n], x.get_dtype(), options)


@functools.cache
def _mid_template() -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear import triton_mid as dense
    from ..kernels.sparse_linear import triton_mid as t

    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("VALUES", 0)}}', "K": '{{size("X", 1)}}'}
    helpers = (
        common.e2m1_to_f16,
        common.e4m3_to_f32,
        common.global_scale_of,
        common.dense_codes,
        common.decompressed,
        dense.decode_bytes,
        dense.scale_of_bytes,
        dense.tile_of,
    )
    return Template("fp4_sparse_linear_mid", t.sparse_mid, _INPUTS, sizes, helpers, mid_grid)


def _mid(row: Span, x, values, meta, scale, global_scale, m, n, k, bounds=()):
    likely = min(likely_rows(m, inductor.Symbols(), linear.HINT), row.max_m or linear.HINT)
    tiles = configs.mid_choices(likely, n, k) if inductor.max_autotune() else [configs.mid(likely, n, k)]
    options = [dict(configs.mid_constants(c, n, k, x.get_dtype(), bounds), num_warps=c.num_warps, num_stages=c.num_stages) for c in tiles]
    return _mid_template().lower(arguments(x, values, meta, scale, global_scale), [m, n], x.get_dtype(), options)


def _large_fp8(row: Span, x, values, meta, scale, global_scale, m, n, k, bounds=()):
    dtype = x.get_dtype()

    def large_fp8(x8, x_scale, values, meta, scale, global_scale):
        return scaled_product(x8, x_scale, fp4.sparse_dequantize_fp8(values, meta, scale), linear.of_rows(global_scale, bounds, n), dtype)

    return inductor.inline(large_fp8, (*quantized_rows(x), values, meta, scale, global_scale))


def _large_dense(row: Span, x, values, meta, scale, global_scale, m, n, k, bounds=()):
    dtype = x.get_dtype()

    def large_dense(x, values, meta, scale, global_scale):
        w = sparse_dequantize_rows if bounds else fp4.sparse_dequantize
        return x @ w(values, meta, scale, linear.of_rows(global_scale, bounds, n), dtype).t()

    return inductor.inline(large_dense, (x, values, meta, scale, global_scale))


LOWER = {
    "triton_sparse_gemv": _gemv,
    "triton_sparse_mid": _mid,
    "sparse_dequantize_fp8 + scaled_mm": _large_fp8,
    "sparse_dequantize + mm": _large_dense,
}
