"""The halves of an RMSNorm (``ops/rms_linear.py``) -> one CUDA kernel each, where one serves this M; else the lowerings of the product and plain operations.

A graph pass has asked whether the kernels serve every M (``passes/rms_halves.py``). The rest is for whoever writes the ops himself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import select
from ..kernels.forms import Epilogue, Library, Options
from ..kernels.select import Plan, plan
from ..ops import rms_linear
from ..ops.linear_siblings import begins
from . import linear, linear_epilogue, linear_glu
from .journal import Entry, record
from .regime import decide


def register() -> None:
    inductor.register(rms_linear.SQUARES.op, lower_squares)
    inductor.register(rms_linear.LINEAR.op, lower_linear)
    inductor.register(rms_linear.LINEAR_SIBLINGS.op, lower_siblings)
    inductor.register(rms_linear.LINEAR_GLU.op, lower_glu)


class _Launch(NamedTuple):
    """The kernel that serves a call, and what explain() says of it."""

    entry: Entry
    library: Library
    arch: int


def lower_squares(*args, **kwargs):
    """Lowering of ``fp4.linear_residual_squares``: x ``[..., K]`` -> y and z ``[..., N]``, squares ``[..., N / 16]``."""
    c: Any = rms_linear.SquaresCall.of(*args, **kwargs)  # of IR values
    launch = _launch("linear_residual_squares", c.x, c.qdata, c.prefill, len(c.rows or ()), "in the kernel: + residual, and the squares of its RMSNorm")
    if launch is None:
        y = inductor.realized(linear_epilogue.lower(*c.product))
        z = inductor.inline(_weighted(c.norm_offset), (y, c.norm_weight))
        return [y, z, inductor.inline(rms_linear.squares_of, (y,))]
    lead = c.x.get_size()[:-1]
    weight, then = _weight((c.qdata, c.scale, c.global_scale), c.rows), Epilogue(tuple(c.rows or ())[1:], residual=_rows(c.residual))
    half = (inductor.contiguous(c.norm_weight), c.norm_offset)
    results = linear.call_csrc(launch.entry, launch.library, (_rows(c.x),), weight, c.bias, launch.arch, Options(then=then, half=half))
    return [_shaped(t, lead) for t in results]


def lower_linear(z, squares, eps, qdata, scale, global_scale, bias=None, prefill="auto", rows=None):
    """Lowering of ``fp4.rms_scaled_linear``: z ``[..., K]`` -> ``[..., N]``."""
    y = _scaled(z, squares, eps, (qdata, scale, global_scale), bias, prefill, rows, "")
    return linear.lower(_applied(z, squares, eps), qdata, scale, global_scale, bias, prefill, rows) if y is None else y


def lower_siblings(z, squares, eps, qdata, scale, global_scale, bias, rows, prefill="auto"):
    """Lowering of ``fp4.rms_scaled_linear_siblings``: z ``[..., K]`` -> ``[..., N]`` of each member."""
    begin = begins(rows) if len(global_scale.get_size()) else []
    y = None if begin is None else _scaled(z, squares, eps, (qdata, scale, global_scale), bias, prefill, begin, linear.together())
    if y is None:
        return linear.lower_siblings(_applied(z, squares, eps), qdata, scale, global_scale, bias, rows, prefill)
    return linear.members(y, rows)


def lower_glu(z, squares, eps, qdata, scale, global_scale, bias=None, act="silu", prefill="auto"):
    """Lowering of ``fp4.rms_scaled_linear_glu``: z ``[..., K]`` -> ``[..., N / 2]``."""
    launch = _launch("rms_scaled_linear_glu", z, qdata, prefill, 1, linear.join(linear.together(), f"{act}(gate) * up", _REMARK))
    if launch is None:
        return linear_glu.lower(_applied(z, squares, eps), qdata, scale, global_scale, bias, act, prefill)
    starts = (inductor.Symbols().static_int(qdata.get_size()[0]) // 2,) if len(global_scale.get_size()) else ()  # type: ignore[operator]
    return _by_kernel(launch, z, squares, eps, (qdata, scale, global_scale), bias, Epilogue(starts, act))


_REMARK = "it scales its sums by the RMSNorm of its input"


def _scaled(z, squares, eps, weight, bias, prefill, rows, note):
    """The product of the rows that the kernel scales; None: no kernel does."""
    launch = _launch("rms_scaled_linear", z, weight[0], prefill, len(rows or ()), linear.join(note, _REMARK))
    return None if launch is None else _by_kernel(launch, z, squares, eps, _weight(weight, rows), bias, Epilogue(tuple(rows or ())[1:]))


def _by_kernel(launch: _Launch, z, squares, eps, weight, bias, then: Epilogue):
    half = (inductor.contiguous(_rows(squares)), eps)
    y = linear.call_csrc(launch.entry, launch.library, (_rows(z),), weight, bias, launch.arch, Options(then=then, half=half))
    return _shaped(y, z.get_size()[:-1])


def _launch(op: str, x, qdata, prefill: str, scales: int, note: str) -> _Launch | None:
    """None: no kernel serves this M, or M is known at run time only."""
    symbols, m = inductor.Symbols(), inductor.rows_of(x)
    n, half_k = map(symbols.static_int, qdata.get_size())
    if not n or not half_k or m == 0 or scales > MAX_SCALES:
        return None
    counts = select.Counts(scales=max(scales, 1))
    options: Plan = plan(select.describe(op, x.get_device(), x.get_dtype(), n, half_k * 2, prefill, counts=counts), dispatch_config())
    decision = decide(options, m, symbols, dispatch_config())
    if decision.row is None or decision.row.library is None:
        return None
    several = f"{scales} global scales" if scales > 1 and not linear.together() else ""
    return _Launch(record(options, decision, m, note=linear.join(several, note)), decision.row.library, options.call.arch)


def _applied(z, squares, eps):
    def scaled(z, squares):
        return rms_linear.scaled(z, squares, eps)

    return inductor.inline(scaled, (z, squares))


def _weighted(offset: float):
    def weighted(y, norm_weight):
        return rms_linear.weighted(y, norm_weight, offset)

    return weighted


def _weight(weight: tuple, rows) -> tuple:
    """As kernels take it: the scale of one member is that of all rows."""
    return (*weight[:-1], inductor.element(weight[-1], 0)) if rows and len(rows) == 1 else weight


def _rows(x):
    """``x`` as ``[M, its last dimension]``, contiguous."""
    x = x if len(x.get_size()) == 2 else inductor.view(x, [inductor.rows_of(x), x.get_size()[-1]])
    return inductor.contiguous(x)


def _shaped(y, lead):
    return y if len(lead) == 1 else inductor.view(y, [*lead, y.get_size()[-1]])
