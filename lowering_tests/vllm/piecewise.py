"""vLLM's piecewise compilation on a CPU as on a GPU, and three kernels by M where a CPU has one, to see which of them runs at which M."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fp4_inductor import _exchange
from fp4_inductor.config import dispatch_config
from fp4_inductor.kernels import select
from fp4_inductor.ops import linear_chain
from fp4_inductor.ranges import range_in_force

BOUNDS = {"gemv": 1, "mid": 16}
SPAN = {"gemv": (1, 1), "mid": (2, 16), "cpu": (17, 1 << 62)}
_LIBRARY = torch.library.Library("fp4_probe", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor q, Tensor s, Tensor g, Tensor? bias, str prefill, int[]? rows, str regime) -> Tensor")
_RAN: collections.Counter[tuple[str, int]] = collections.Counter()


def _run(x, q, s, g, bias, prefill, rows, regime):
    _RAN[regime, x.numel() // x.shape[-1]] += 1
    return torch.ops.fp4.linear(x, q, s, g, bias, prefill, rows)


_LIBRARY.impl("linear", _run, "CPU")
torch.library.register_fake("fp4_probe::linear", lambda x, q, s, g, bias, prefill, rows, regime: x.new_empty(*x.shape[:-1], q.shape[0]), lib=_LIBRARY)


@contextmanager
def kept(monkeypatch: Any) -> Iterator[None]:
    """vLLM's CPU platform leaves the compilation mode alone, where it would replace the piecewise one."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls, vllm_config):
        compilation = vllm_config.compilation_config
        mode, backend = compilation.mode, compilation.backend
        update(cls, vllm_config)
        compilation.mode, compilation.backend = mode, backend
        compilation.compile_sizes = compilation.compile_sizes or []  # as where CUDA graphs are

    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
        yield


@contextmanager
def three_kernels(monkeypatch: Any) -> Iterator[tuple[collections.Counter, list]]:
    """(how often each (regime, M) ran, decisions) of ``fp4.linear`` in graphs that are compiled inside."""
    from fp4_inductor.integrations.vllm import compiling
    from fp4_inductor.lowerings import linear

    plan, decide, call_op = linear.plan, linear.decide, linear.inductor.call_op
    decisions: list = []

    def three(call, config):
        found = plan(call, config)
        last = found.rows[-1]
        limited = (replace(last, implementation=replace(last.implementation, regime=r), max_m=m) for r, m in BOUNDS.items())
        return replace(found, rows=(*limited, last))

    def decided(options, m, symbols, config):
        decisions.append(decide(options, m, symbols, config))
        return decisions[-1]

    def called(op, *args):
        if op is not torch.ops.fp4.linear.default or not decisions:
            return call_op(op, *args)
        row = decisions[-1].row
        x, q, s, g, bias, prefill, rows = (*args, *(None, "auto", None)[len(args) - 4 :])
        return call_op(torch.ops.fp4_probe.linear.default, x, q, s, g, bias, prefill, rows, "runtime" if row is None else row.regime)

    _RAN.clear()
    with monkeypatch.context() as patch:
        patch.setattr(linear, "plan", three)
        patch.setattr(linear, "decide", decided)
        patch.setattr(linear.inductor, "call_op", called)
        patch.setattr(compiling, "plan", three)
        compiling._bounds.cache_clear()
        try:
            yield _RAN, decisions
        finally:
            compiling._bounds.cache_clear()


_LIBRARY.define(f"linear_chain{linear_chain.CONTRACT.schema}")
CHAINS: list[tuple[int, int]] = []  # of each run: rows, and the address of its counters


def _run_chain(*args):
    c = linear_chain.ChainCall.of(*args)
    assert not c.arrivals.any(), "counters are zero ahead of a launch"
    CHAINS.append((c.x.shape[0], c.arrivals.data_ptr()))
    return linear_chain.one_by_one(c)


_LIBRARY.impl("linear_chain", _run_chain, "CPU")
torch.library.register_fake("fp4_probe::linear_chain", lambda *args: linear_chain.fake(linear_chain.ChainCall.of(*args)), lib=_LIBRARY)


_NAMES: dict[int, str] = {}  # of groups, by the number by which a graph knows them


@contextmanager
def divided(monkeypatch: Any, reason: str = "") -> Iterator[None]:
    """Models are built as on several ranks, of which there is one: vLLM's operator sums behind o and down. ``reason``: why the ranks share no memory."""
    from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear

    from fp4_inductor.integrations.vllm import ranks

    forward = RowParallelLinear.forward

    def summed(self, x):
        y, bias = forward(self, x)
        return torch.ops.vllm.all_reduce(y, group_name=get_tp_group().unique_name), bias

    def join(group, device, cpu_group, apart):
        name = group.group_name
        _NAMES[_exchange.number_of(name)] = name
        if reason:
            _exchange.refuse(name, reason)
        else:
            _exchange.add(name, _exchange.Exchange((0,), 0, None))
        return reason

    with monkeypatch.context() as patch:
        patch.setattr(_exchange, "_GROUPS", {})
        patch.setattr(_exchange, "_REASONS", {})
        patch.setattr(RowParallelLinear, "forward", summed)
        patch.setattr(GroupCoordinator, "_all_reduce_out_place", lambda self, part: part.clone())
        patch.setattr(ranks, "tensor_parallel_group", get_tp_group)
        patch.setattr(ranks, "join_or_agree", join)
        yield


@contextmanager
def as_for_a_gpu(monkeypatch: Any) -> Iterator[list[tuple[int, int]]]:
    """Passes rewrite the graph of one token as on sm_90; its products run on this CPU. Norms are one operator, as on a GPU. The runs of chains inside."""
    from torch._inductor.virtualized import NullHandler, V
    from vllm.platforms.cpu import CpuPlatform

    from fp4_inductor.lowerings import linear_chain as chains
    from fp4_inductor.passes import epilogue

    of_cpu, update, call_op = select.describe, CpuPlatform.check_and_update_config.__func__, chains.inductor.call_op

    def wrap(cls, vllm_config):
        update(cls, vllm_config)
        vllm_config.compilation_config.ir_enable_torch_wrap = True

    def describe(op, device, dtype, n, k, prefill="auto", form=(), counts=select.ONE, eager=False):
        found = of_cpu(op, device, dtype, n, k, prefill, form, counts, eager)
        of_gpu = op == "linear_chain" or (op in ("linear", "linear_epilogue", "linear_glu") and isinstance(V.graph, NullHandler))  # no graph is lowered yet
        return replace(found, arch=90, csrc="") if of_gpu and range_in_force() == (1, 1) else found

    def plan_of(layer):
        x, qdata = (argument.meta["val"] for argument in epilogue.arguments_of(layer)[1][:2])
        return select.plan(describe("linear_epilogue", x.device, x.dtype, qdata.shape[0], 2 * qdata.shape[1]), dispatch_config())

    def called(op, *args):
        if op is torch.ops.fp4_csrc.linear_chain.default:
            return call_op(torch.ops.fp4_probe.linear_chain.default, *args[:-3], _NAMES.get(args[-3], ""))  # without early and the architecture
        return call_op(op, *args)

    CHAINS.clear()
    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(wrap))
        patch.setattr(select, "describe", describe)
        patch.setattr(epilogue, "_plan_of", plan_of)
        patch.setattr(chains.inductor, "call_op", called)
        with kept(monkeypatch):
            yield CHAINS
