"""A graph as vLLM's on several ranks: its all-reduce, and its sum with a norm, are part of a launch that sums over the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config

from fp4_inductor import _engines, _exchange
from fp4_inductor.formats import nvfp4
from fp4_inductor.integrations.vllm import compiling, engine
from fp4_inductor.passes.missed import UNCHAINED, listen
from lowering_tests import norm_kernels
from lowering_tests.passes.conftest import Recorder, _run_after_passes
from lowering_tests.ranks import group_of_one

BF16, fp4, K = torch.bfloat16, torch.ops.fp4, 64


@pytest.fixture
def alone(tmp_path, monkeypatch):
    yield from group_of_one(tmp_path, monkeypatch)


@pytest.fixture
def group(alone, monkeypatch):
    """torch's group of this process alone, which vLLM calls tp:0."""
    from vllm.distributed import parallel_state

    found = SimpleNamespace(device_group=alone, _all_reduce_out_place=torch.clone)
    monkeypatch.setitem(parallel_state._groups, "tp:0", lambda: found)
    return alone


def made(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return tuple(nvfp4.quantize(torch.randn(n, k) / k**0.5))


@pytest.mark.parametrize("joined", [True, False])
def test_what_is_one_launch(group, joined):
    import vllm.ir.ops  # noqa: F401

    compiling.register()
    if joined:
        _exchange.add(group.group_name, _exchange.Exchange((0,), 0, None))
    namespace, _, name = engine.ADD_NORM.partition("::")
    add_norm = getattr(getattr(torch.ops, namespace), name)

    def step(attended, residual, o, norm, gate_up, down, second_norm, qkv):
        part = torch.ops.vllm.all_reduce(fp4.linear(attended, *o), group_name="tp:0")
        y, residual = add_norm(part, residual, norm, 1e-6)
        gate, up = fp4.linear(y, *gate_up).chunk(2, -1)
        part = torch.ops.vllm.all_reduce(fp4.linear(F.silu(gate) * up, *down), group_name="tp:0")
        y, residual = add_norm(part, residual, second_norm, 1e-6)
        return fp4.linear(y, *qkv), residual

    x, residual, norm, second_norm = (torch.randn(*shape).to(BF16) for shape in ((1, K), (1, K), (K,), (K,)))
    parts = x, residual, made(K, K), norm, made(256, K), made(K, 128), second_norm, made(96, K)
    recorder, remove = Recorder(), _engines.add_provider(lambda: True)
    try:
        patches = inductor_config.patch({"force_disable_caches": True, "post_grad_custom_post_pass": recorder})
        with torch.no_grad(), norm_kernels.on_a_cpu(), listen() as left, patches:
            got = torch.compile(step, fullgraph=True, backend=_run_after_passes)(*parts)
    finally:
        remove()
    graph, reasons = recorder.texts[-1], [m.reason for m in left if m.what == UNCHAINED]
    if joined:
        assert graph.count("fp4.linear_chain") == 1 and "vllm.all_reduce" not in graph and engine.ADD_NORM.replace("::", ".") not in graph
        assert f"summed=[0, 2], group={group.group_name}" in graph and "added=[-1, -1, 0, -1]" in graph and reasons == []
    else:
        assert graph.count("vllm.all_reduce") == 2
        assert reasons == ["its result is summed over ranks: the ranks of this group share no memory"] * 2
    for a, b in zip(got, step(*parts), strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2
