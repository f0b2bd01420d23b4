"""Plans with a CUDA kernel of one row that computes the norm of its activations, for tests of graphs; nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from fp4_inductor._journal import LOWERED
from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels import csrc, registry, select
from fp4_inductor.kernels.forms import Library
from fp4_inductor.kernels.kernel import MEASURED, Call, Kernel, On, Span
from fp4_inductor.kernels.select import Plan
from fp4_inductor.lowerings import linear, linear_epilogue, linear_glu
from fp4_inductor.passes import epilogue, norm

ON = (On(90, 90, MEASURED, "a test"),)


def kernel(op: str, finish: str, takes_norm: bool = True) -> Kernel:
    library = Library("gemm/of_a_test.cu", ("qdata", "scale"), ("rows", "warps"), finish, early=True, most_rows=lambda arch: 1, norm=takes_norm)
    return Kernel(op, f"row{'' if finish == 'plain' else f'_{finish}'}", "small", ON, form=library)


KERNELS = {"linear": kernel("linear", "plain"), "linear_epilogue": kernel("linear_epilogue", "pointwise"), "linear_glu": kernel("linear_glu", "glu")}


def plan(call: Call, config: DispatchConfig) -> Plan:
    """As ``select.plan``, M = 1 served by :data:`KERNELS`."""
    options, first = select.plan(call, config), KERNELS.get(call.op)
    if first is None or call.arch != 90 or first.refusal(call):
        return options
    rest = tuple(row for row in options.rows if row.max_m is None or row.max_m > 1)
    return replace(options, rows=(Span(first, 1, ON[0], first.library), *rest))


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Inside, passes rewrite graphs of CPU tensors as if they were on a GPU that such plans are for."""

    def describe(op, device, dtype, n, k, prefill="auto", form=(), counts=select.ONE, eager=False):
        return Call(op, 90, dtype, n, k, prefill, "", counts.experts, form=form, scales=counts.scales, eager=eager)

    def plan_of(linear):
        x, qdata = (argument.meta["val"] for argument in epilogue.arguments_of(linear)[1][:2])
        return plan(describe("linear_epilogue", x.device, x.dtype, qdata.shape[0], 2 * qdata.shape[1]), DispatchConfig())

    with serving(), mock.patch.object(select, "describe", describe), mock.patch.object(epilogue, "_plan_of", plan_of):
        yield


@contextmanager
def serving() -> Iterator[None]:
    """Inside, passes and lowerings see such plans, and the kernels' operators exist."""
    libraries = {k.library.name: k.library for k in KERNELS.values()}
    for name, library in libraries.items():
        if not hasattr(torch.ops.fp4_csrc, name):
            csrc._define(name, library)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(csrc.LIBRARIES, libraries))
        for module in (epilogue, norm, linear, linear_glu, linear_epilogue):
            stack.enter_context(mock.patch.object(module, "plan", plan))
        stack.callback(LOWERED.forget)  # who reads the journal later asks for the kernels that it names
        yield


def switched_on() -> tuple[str, ...]:
    """The kernels with half of an RMSNorm that ``DispatchConfig.candidates`` has to name on sm_90."""
    return tuple(k.name for k in registry.kernels() if k.library and k.library.half and (on := k.at(90)) is not None and on.off)
