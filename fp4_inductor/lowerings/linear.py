"""fp4.linear -> the kernel of one regime, epilogues left to Inductor's fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _engines
from .._torch import lowering as inductor
from .._torch import order
from ..config import dispatch_config
from ..formats import nvfp4
from ..formats.packing import MAX_SCALES
from ..formats.storage import Storage
from ..kernels import select
from ..kernels.forms import Composed, Epilogue, Library, Norm, Options
from ..kernels.kernel import Span
from ..kernels.select import plan
from ..ops.linear_siblings import begins, spans
from ..passes.epilogue import LEFT_APART
from ..passes.siblings import MEMBERS
from . import forms, linear_w4a4
from . import norm as norms
from .journal import Entry, record
from .quantize_rows import nvfp4_rows, quantized_rows
from .regime import decide

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear.default, lower)
    inductor.register(fp4.linear_siblings.default, lower_siblings)
    inductor.register(fp4.norm_linear.default, norms.in_front_of(lower))
    inductor.register(fp4.norm_linear_siblings.default, norms.in_front_of(lower_siblings))


def lower(x, qdata, scale, global_scale, bias=None, prefill="auto", rows=None, norm: Norm | None = None):
    """Lowering of ``fp4.linear``: x ``[..., K]`` -> ``[..., N]``; ``norm``: x is normalised first."""
    return dense_product(Product(x, (qdata, scale, global_scale), bias, prefill, rows, norm), Remarks(refused=left_apart()))


class Product(NamedTuple):
    """``x [..., K]`` times a weight of N rows, in a graph.

    ``begin``: the rows at which those with a global scale each begin; None: there is one scale. ``norm``: x is normalised first, by the kernel if it takes
    that.
    """

    x: Any
    weight: tuple
    bias: Any
    prefill: str
    begin: Any = None
    norm: Norm | None = None


class Remarks(NamedTuple):
    """What explain() says of a call besides its kernel. ``refused``: other kernels, and why they were not taken; ``module``: the path of the layer, if it is
    not that of the node being lowered."""

    note: str = ""
    refused: tuple = ()
    module: str = ""


NO_REMARKS = Remarks()


def left_apart() -> tuple:
    """What the pass that makes epilogues refused for the node being lowered, for explain()."""
    return inductor.current_meta(LEFT_APART) or ()


def dense_product(call: Product, remarks: Remarks):
    """:func:`product` of ``fp4.linear``."""
    return product(fp4.linear.default, nvfp4.STORAGE, call, remarks)


def lower_siblings(x, qdata, scale, global_scale, bias, rows, prefill="auto", norm: Norm | None = None):
    """Lowering of ``fp4.linear_siblings``: views of one call by all rows where the kernel of this M takes their global scales, else a call each."""
    call = Siblings(x, (qdata, scale, global_scale), bias, rows, prefill, norm=norm)
    y = merged(call)
    return one_by_one(call) if y is None else members(y, rows)


class Siblings(NamedTuple):
    """A call of several layers, whose weights lie one behind the other: ``rows`` are the first and the last row of each; ``norm``: x is normalised first."""

    x: Any
    weight: tuple
    bias: Any
    rows: list
    prefill: str
    remarks: Remarks = NO_REMARKS
    norm: Norm | None = None


def members(y, rows):
    """Those of a call of :func:`merged`."""
    return [inductor.part(y, len(y.get_size()) - 1, a, b) for a, b in spans(rows)]


def one_by_one(call: Siblings):
    """The results of the members, of a call each."""
    qdata, scale, global_scale = call.weight
    paths = inductor.current_meta(MEMBERS) or [""] * (len(call.rows) // 2)
    alone = join("siblings one by one: the kernel of this M takes one global scale", call.remarks.note)
    x, out = norms.applied(call.x, call.norm), []
    for i, (a, b) in enumerate(spans(call.rows)):
        weight = (inductor.part(qdata, 0, a, b), inductor.part(scale, 0, a, b), inductor.element(global_scale, i))
        own_bias = None if call.bias is None else inductor.part(call.bias, 0, a, b)
        out.append(dense_product(Product(x, weight, own_bias, call.prefill), Remarks(alone, call.remarks.refused, paths[i])))
    return out


def merged(call: Siblings):
    """The results of the members side by side, of one call; None where no kernel of this M takes their global scales."""
    begin = None
    if len(call.weight[-1].get_size()) == 1:
        begin = begins(call.rows)
        if begin is None or not _serves_siblings(call.x, call.weight[0], begin, call.prefill):
            return None
    remarks = call.remarks._replace(note=join(together(), call.remarks.note))
    return dense_product(Product(call.x, call.weight, call.bias, call.prefill, begin, call.norm), remarks)


def _serves_siblings(x, qdata, begin, prefill) -> bool:
    """Is M in a regime whose kernel takes one global scale per member, or known at run time only, where the operator finds one that does?"""
    symbols = inductor.Symbols()
    n, k = map(symbols.static_int, nvfp4.STORAGE.logical(qdata.get_size()))
    if n is None or not k or len(begin) > MAX_SCALES:
        return False
    options = plan(select.describe("linear", x.get_device(), x.get_dtype(), n, k, prefill), dispatch_config())
    decision = decide(options, inductor.rows_of(x), symbols, dispatch_config())
    return options.call.arch != 0 and (decision.row is None or takes_scales(decision.row, x, n, k))


def takes_scales(row: Span, x, n: int, k: int) -> bool:
    """Does the kernel of ``row`` take several global scales?"""
    if rounds_to_nvfp4(row):
        return not linear_w4a4.row_for(x.get_device(), x.get_dtype(), n, k).one_scale
    return not row.one_scale


def rounds_to_nvfp4(row: Span) -> bool:
    """Does fp4.linear_w4a4 serve it, by its own choice of a kernel?"""
    return isinstance(row.implementation.form, Composed) and row.implementation.form.rounded == "nvfp4"


def together(members: Sequence[str] | None = None) -> str:
    """The layers that the node being lowered is one call of, for explain(). ``members``: their paths; None: those that a pass left in the node."""
    members = inductor.current_meta(MEMBERS) or () if members is None else members
    names = [path.rpartition(".")[2] for path in members if path]
    return f"one call for siblings: {', '.join(names)}" if names else ""


def join(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def product(op, storage: Storage, call: Product, remarks: Remarks = NO_REMARKS):
    """IR of ``op(x, *weight, bias, prefill, begin)``: that of the kernel that serves M, or the op itself."""
    x, weight, bias, prefill, begin, norm = call
    begin = list(begin or ())
    if len(begin) == 1:  # of all rows
        begin, weight = [], (*weight[:-1], inductor.element(weight[-1], 0))
    own = (begin,) if begin else ()  # behind the arguments that every call has
    symbols = inductor.Symbols()
    lead = x.get_size()[:-1]
    n, k = map(symbols.static_int, storage.logical(weight[0].get_size()))
    if n is None or k is None:
        return inductor.call_op(op, norms.applied(x, norm), *weight, bias, prefill, *own)
    m = inductor.rows_of(x)
    if m == 0 or n == 0 or k == 0:
        return _empty(x, lead, n, bias)
    name, scales = op._opname, len(begin) if 1 < len(begin) <= MAX_SCALES else 1
    described = select.describe(name, x.get_device(), x.get_dtype(), n, k, prefill, counts=select.Counts(scales=scales))
    options = plan(described, dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    row, arch = decision.row, described.arch
    by_itself = row is None or arch == 0 or row.implementation.launch is not None or bool(begin and (scales == 1 or not takes_scales(row, x, n, k)))
    if by_itself or not norms.takes_norm(row):
        x, norm = norms.applied(x, norm), None
    remark = select.of_scales(len(begin), arch, apart=by_itself and row is not None)
    if remarks.note and remark.endswith("scales"):  # another remark says whose they are
        remark = ""
    entry = record(options, decision, m, refused=remarks.refused, module=remarks.module, note=join(remarks.note, remark, norms.remark(norm)))
    if row is None or by_itself:
        return inductor.call_op(op, x, *weight, bias, prefill, *own)
    rows = x if len(lead) == 1 else inductor.view(x, [m, k])
    if row.library:  # an operator of its own: no Python between the graph and the kernel, which adds the bias itself
        parts = quantized_rows(rows, lane_order=row.library.lane_order) if row.library.fp8 else (rows,)
        y = call_csrc(entry, row.library, parts, weight, bias, arch, Options(then=Epilogue(starts=tuple(begin[1:])), norm=norm))
        return y if len(lead) == 1 else inductor.view(y, [*lead, n])
    problem = forms.problem(rows, n, k, tuple(begin[1:]))
    if rounds_to_nvfp4(row):
        y = linear_w4a4.product(nvfp4_rows(rows), weight, problem, m)
    else:
        y = forms.product(row, rows, weight, problem, m)
    entry.buffer = inductor.buffer_name(y)
    if bias is not None:
        y = inductor.add(y, bias)
    return y if len(lead) == 1 else inductor.view(y, [*lead, n])


def call_csrc(entry: Entry, library: Library, parts: tuple, weight: tuple, bias, arch: int, asked: Options):
    """IR of the operator of ``library``; ``parts``: of the activations. Notes in ``entry`` whether the kernel uses programmatic dependent launch.

    ``asked``: its ``early`` is decided here. The weight of its norm is ``[K]`` in the activations' dtype; tensors of its half of a norm are contiguous.
    """
    operator = getattr(torch.ops.fp4_csrc, library.name).default
    given, early, norm = tuple(inductor.contiguous(t) for t in (*parts, *weight)), False, asked.norm
    if norm is not None:
        norm = norm._replace(weight=inductor.contiguous(norm.weight))
    if library.early:
        read = (*given[len(parts) : -1], *(() if norm is None else (norm.weight,)))  # before the kernel before has ended; the global scale is not
        early, told = begins_early(arch, given[: len(parts)], read)
        entry.note = join(entry.note, told)
    return inductor.call_op(operator, *given, bias, arch, *select.csrc_arguments(library.name, asked._replace(early=early, norm=norm)))


_FIRST_PDL = 90  # programmatic dependent launch


def begins_early(arch: int, activations: tuple, read: tuple) -> tuple[bool, str]:
    """May a kernel that reads ``read``, its weight, begin while the kernel before it runs? And what explain() says of it. All are realised and contiguous."""
    if arch < _FIRST_PDL:
        return False, ""
    why_not = 'DispatchConfig(early="never")' if dispatch_config().early == "never" else order.why_not_early(activations, read, _engines.compiles())
    return not why_not, f"not begun early: {why_not}" if why_not else "begins while the kernel before it runs"


def _empty(x, lead, n, bias):
    y = inductor.full([*lead, n], 0.0, x)
    return y if bias is None else inductor.add(y, bias)
