"""fp4.linear -> the kernel of one regime, epilogues left to Inductor's fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._torch import lowering as inductor
from .._torch import order
from .._torch.template import Template
from ..config import dispatch_config
from ..formats import nvfp4
from ..formats.storage import Storage
from ..kernels import select
from ..kernels.kernel import Span
from ..kernels.linear import configs
from ..kernels.select import plan
from ..ops.dequantize import dequantize_rows
from ..ops.dequantize_fp8 import fp8_product
from ..ops.linear_siblings import begins, spans
from ..ops.members import row_scales
from ..passes.epilogue import LEFT_APART
from ..passes.siblings import MEMBERS
from . import linear_w4a4
from .journal import Entry, record
from .quantize_rows import nvfp4_rows, quantized_rows
from .regime import decide
from .regime import likely as likely_rows
from .templates import arguments, gemv_grid, mid_grid

fp4 = torch.ops.fp4
HINT = 64


def register() -> None:
    inductor.register(fp4.linear.default, lower)
    inductor.register(fp4.linear_siblings.default, lower_siblings)


def lower(x, qdata, scale, global_scale, bias=None, prefill="auto", rows=None, refused=()):
    """Lowering of ``fp4.linear``: x ``[..., K]`` -> ``[..., N]``; ``refused``: what else explain() should say was not taken."""
    return _call(x, (qdata, scale, global_scale), bias, prefill, refused=refused or inductor.current_meta(LEFT_APART) or (), begin=rows)


def _call(x, weight: tuple, bias, prefill: str, **remarks):
    return product(fp4.linear.default, nvfp4.STORAGE, x, weight, bias, prefill, _LOWER, **remarks)


def lower_siblings(x, qdata, scale, global_scale, bias, rows, prefill="auto"):
    """Lowering of ``fp4.linear_siblings``: views of one call by all rows where the kernel of this M takes their global scales."""
    return siblings(x, qdata, scale, global_scale, bias, rows, prefill)


def siblings(x, qdata, scale, global_scale, bias, rows, prefill, note="", refused=()):
    """The results of the members of one weight, views of one result or one each."""
    call = (x, qdata, scale, global_scale, bias, rows, prefill, note, refused)
    y = merged(*call)
    return one_by_one(*call) if y is None else members(y, rows)


def members(y, rows):
    """Those of a call of :func:`merged`."""
    return [inductor.part(y, len(y.get_size()) - 1, a, b) for a, b in spans(rows)]


def one_by_one(x, qdata, scale, global_scale, bias, rows, prefill, note="", refused=()):
    """The results of the members, of a call each."""
    paths = inductor.current_meta(MEMBERS) or [""] * (len(rows) // 2)
    alone = join("siblings one by one: the kernel of this M takes one global scale", note)
    out = []
    for i, (a, b) in enumerate(spans(rows)):
        weight = (inductor.part(qdata, 0, a, b), inductor.part(scale, 0, a, b), inductor.element(global_scale, i))
        own_bias = None if bias is None else inductor.part(bias, 0, a, b)
        out.append(_call(x, weight, own_bias, prefill, note=alone, refused=refused, module=paths[i]))
    return out


def merged(x, qdata, scale, global_scale, bias, rows, prefill, note="", refused=()):
    """The results of the members side by side, of one call; None where no kernel of this M takes their global scales."""
    begin = None
    if len(global_scale.get_size()) == 1:
        begin = begins(rows)
        if begin is None or not _serves_siblings(x, qdata, begin, prefill):
            return None
    return _call(x, (qdata, scale, global_scale), bias, prefill, note=join(together(), note), refused=refused, begin=begin)


def _serves_siblings(x, qdata, begin, prefill) -> bool:
    """Is M in a regime whose kernel takes one global scale per member, or known at run time only, where the operator finds one that does?"""
    symbols = inductor.Symbols()
    n, k = map(symbols.static_int, nvfp4.STORAGE.logical(qdata.get_size()))
    if n is None or not k or len(begin) > configs.MAX_SCALES:
        return False
    options = plan(select.describe("linear", x.get_device(), x.get_dtype(), n, k, prefill), dispatch_config())
    decision = decide(options, inductor.rows_of(x), symbols, dispatch_config())
    return options.call.arch != 0 and (decision.row is None or takes_scales(decision.row, x, n, k))


def takes_scales(row: Span, x, n: int, k: int) -> bool:
    """Does the kernel of ``row`` take several global scales?"""
    if row.regime == "large_nvfp4":
        return not linear_w4a4.row_for(x.get_device(), x.get_dtype(), n, k).one_scale
    return not row.one_scale


def together() -> str:
    """The layers that the node being lowered is one call of, for explain()."""
    names = [path.rpartition(".")[2] for path in inductor.current_meta(MEMBERS) or () if path]
    return f"one call for siblings: {', '.join(names)}" if names else ""


def join(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def product(op, storage: Storage, x, weight: tuple, bias, prefill: str, lowered: dict[str, Callable], *, note="", refused=(), module="", begin=None):
    """IR of ``op(x, *weight, bias, prefill, begin)``: ``lowered[kernel](row, rows of x, *weight, m, n, k)`` of the kernel that serves M, or the op itself.

    Args:
        note, refused, module: further remarks for explain(); the path of the layer, if not that of the node being lowered.
        begin: the rows at which those with a global scale each begin; None: there is one scale.
    """
    begin = list(begin or ())
    if len(begin) == 1:  # of all rows
        begin, weight = [], (*weight[:-1], inductor.element(weight[-1], 0))
    own = (begin,) if begin else ()  # behind the arguments that every call has
    symbols = inductor.Symbols()
    lead = x.get_size()[:-1]
    n, k = map(symbols.static_int, storage.logical(weight[0].get_size()))
    if n is None or k is None:
        return inductor.call_op(op, x, *weight, bias, prefill, *own)
    m = inductor.rows_of(x)
    if m == 0 or n == 0 or k == 0:
        return _empty(x, lead, n, bias)
    name, scales = op._opname, len(begin) if 1 < len(begin) <= configs.MAX_SCALES else 1
    call = select.describe(name, x.get_device(), x.get_dtype(), n, k, prefill, scales=scales)
    options = plan(call, dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    row = decision.row
    by_itself = row is None or call.arch == 0 or row.implementation.launch is not None or bool(begin and (scales == 1 or not takes_scales(row, x, n, k)))
    remark = select.of_scales(len(begin), call.arch, apart=by_itself and row is not None)
    if note and remark.endswith("scales"):  # another remark says whose they are
        remark = ""
    entry = record(options, decision, m, refused=refused, module=module, note=join(note, remark))
    if row is None or by_itself:
        return inductor.call_op(op, x, *weight, bias, prefill, *own)
    rows = x if len(lead) == 1 else inductor.view(x, [m, k])
    if row.csrc:  # an operator of its own: no Python between the graph and the kernel, which adds the bias itself
        parts = quantized_rows(rows, lane_order=row.kernel == "cuda_wide_fp8") if row.regime == "wide_fp8" else (rows,)
        y = call_csrc(entry, row.csrc, parts, weight, bias, call.arch, configs.Epilogue(starts=tuple(begin[1:])))
        return y if len(lead) == 1 else inductor.view(y, [*lead, n])
    y = lowered[row.kernel](row, rows, *weight, m, n, k, tuple(begin[1:]))
    entry.buffer = inductor.buffer_name(y)
    if bias is not None:
        y = inductor.add(y, bias)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n])


def call_csrc(entry: Entry, name: str, parts: tuple, weight: tuple, bias, arch: int, then: configs.Epilogue):
    """IR of ``torch.ops.fp4_csrc.<name>``; ``parts``: of the activations. Notes in ``entry`` whether the kernel begins early."""
    operator = getattr(torch.ops.fp4_csrc, name).default
    given, early = arguments(*parts, *weight), False
    if select.csrc_begins_early(name):
        why_not = _why_not_early(given, len(parts))
        early = not why_not
        entry.note = join(entry.note, f"not begun early: {why_not}" if why_not else "begins while the kernel before it runs")
    return inductor.call_op(operator, *given, bias, arch, *select.csrc_arguments(name, then, early))


def _why_not_early(given: tuple, activations: int) -> str:
    """``given``: so many parts of the activations, those of the weight, its global scale."""
    if dispatch_config().early == "never":
        return 'DispatchConfig(early="never")'
    return order.why_not_early(given[:activations], given[activations:-1])


def _empty(x, lead, n, bias):
    y = inductor.full([*lead, n], 0.0, x)
    return y if bias is None else inductor.add(y, bias)


# --- templates ---------------------------------------------------------------------------------------------------

_INPUTS = ("X", "QDATA", "SCALE", "GLOBAL_SCALE")


@functools.cache
def _gemv_template() -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear import triton_gemv as t

    helpers = (common.e4m3_to_f32, common.global_scale_of, t.decode8, t.half2_dot, t.dot8, t.pack_half2, t.load_activations, t.partial_sums)
    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("QDATA", 0)}}', "K8": '{{size("QDATA", 1)}} // 4'}
    return Template("fp4_linear_gemv", t.linear_gemv, _INPUTS, sizes, helpers, gemv_grid)


@functools.cache
def _mid_template() -> Template:
    from ..kernels import triton_common as common
    from ..kernels.linear import triton_mid as t

    sizes = {"M": '{{size("X", 0)}}', "N": '{{size("QDATA", 0)}}', "K": '{{size("X", 1)}}'}
    helpers = (common.e2m1_to_f16, common.e4m3_to_f32, common.global_scale_of, t.decode_bytes, t.scale_of_bytes, t.tile_of)
    return Template("fp4_linear_mid", t.linear_mid, _INPUTS, sizes, helpers, mid_grid)


def _gemv(row: Span, x, qdata, scale, global_scale, m, n, k, bounds=()):
    largest = int(m) if m.is_number else row.max_m or 1
    tiles = configs.gemv_choices(largest, n, k) if inductor.max_autotune() else [configs.gemv(largest, n, k)]
    arch = select.arch_of(x.get_device())
    options = [dict(configs.gemv_constants(c, n, k, arch, bounds), num_warps=c.num_warps, num_stages=2) for c in tiles]
    return _gemv_template().lower(arguments(x, qdata, scale, global_scale), [m, n], x.get_dtype(), options)


def _mid(row: Span, x, qdata, scale, global_scale, m, n, k, bounds=()):
    likely = min(likely_rows(m, inductor.Symbols(), HINT), row.max_m or HINT)
    tiles = configs.mid_choices(likely, n, k) if inductor.max_autotune() else [configs.mid(likely, n, k)]
    options = [dict(configs.mid_constants(c, n, k, x.get_dtype(), bounds), num_warps=c.num_warps, num_stages=c.num_stages) for c in tiles]
    return _mid_template().lower(arguments(x, qdata, scale, global_scale), [m, n], x.get_dtype(), options)


# --- many rows: plain operations around a transient weight --------------------------------------------------------


def of_rows(global_scale, bounds, n):
    """``[n]``, or the one scale that all rows have."""
    return row_scales(global_scale, (0, *bounds), n) if bounds else global_scale


def _large_fp8(row: Span, x, qdata, scale, global_scale, m, n, k, bounds=()):
    dtype = x.get_dtype()

    def large_fp8(x8, x_scale, qdata, scale, global_scale):
        return fp8_product(x8, x_scale, qdata, scale, of_rows(global_scale, bounds, n), dtype)

    return inductor.inline(large_fp8, (*quantized_rows(x), qdata, scale, global_scale))


def _large_dense(row: Span, x, qdata, scale, global_scale, m, n, k, bounds=()):
    dtype = x.get_dtype()

    def large_dense(x, qdata, scale, global_scale):
        w = dequantize_rows if bounds else fp4.dequantize
        return x @ w(qdata, scale, of_rows(global_scale, bounds, n), dtype).t()

    return inductor.inline(large_dense, (x, qdata, scale, global_scale))


def _large_nvfp4(row: Span, x, qdata, scale, global_scale, m, n, k, bounds=()):
    return linear_w4a4.product(nvfp4_rows(x), (qdata, scale, global_scale), x.get_dtype(), m, n, k, bounds)


_LOWER = {
    "triton_gemv": _gemv,
    "triton_mid": _mid,
    "dequantize_fp8 + scaled_mm": _large_fp8,
    "dequantize + mm": _large_dense,
    "quantize_rows_nvfp4 + linear_w4a4": _large_nvfp4,
}
