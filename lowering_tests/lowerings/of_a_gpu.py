"""Graphs as on a GPU, for tests that run them on a CPU with emulated kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from fp4_inductor.config import dispatch_config
from fp4_inductor.kernels import select
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.passes import epilogue


@contextlib.contextmanager
def linear_layers_of_a_gpu(*ops: str) -> Iterator[None]:
    """Passes and lowerings choose the kernels of linear layers, of ``ops`` besides, as on sm_90; those of attention as on this CPU."""
    of_cpu = select.describe

    def describe(op, device, dtype, n, k, prefill="auto", form=(), counts=select.ONE, eager=False):
        if op not in ("linear", "linear_epilogue", "linear_glu", *ops):
            return of_cpu(op, device, dtype, n, k, prefill, form, counts, eager)
        return Call(op, 90, dtype, n, k, prefill, "", form=form, scales=counts.scales, eager=eager)

    def plan_of(linear):
        x, qdata = (argument.meta["val"] for argument in epilogue.arguments_of(linear)[1][:2])
        return select.plan(describe("linear_epilogue", x.device, x.dtype, qdata.shape[0], 2 * qdata.shape[1]), dispatch_config())

    with mock.patch.object(select, "describe", describe), mock.patch.object(epilogue, "_plan_of", plan_of):
        yield
