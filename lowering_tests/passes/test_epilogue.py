"""act(linear) * mul + residual becomes fp4.linear_epilogue where a CUDA kernel has such an epilogue, and nothing else does.

Graphs on the CPU: the plan of a GPU is pretended, and the op computes its steps one by one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_inductor
from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.passes import epilogue

BF16 = torch.bfloat16
K, N = 64, 48


class Layer(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = fp4_inductor.quantize_model(nn.Sequential(nn.Linear(K, N, dtype=BF16)), progress=False)[0]
        self.then = then

    def forward(self, x, a, b):
        return self.then(self.linear(x), a, b)


TAKEN = {
    "residual": (lambda y, a, b: y + a, ("", False, True)),
    "residual, the other way": (lambda y, a, b: a + y, ("", False, True)),
    "silu": (lambda y, a, b: F.silu(y), ("silu", False, False)),
    "silu * mul": (lambda y, a, b: F.silu(y) * a, ("silu", True, False)),
    "mul": (lambda y, a, b: a * y, ("", True, False)),
    "gelu": (lambda y, a, b: F.gelu(y), ("gelu", False, False)),
    "tanh gelu * mul + residual": (lambda y, a, b: b + F.gelu(y, approximate="tanh") * a, ("gelu_tanh", True, True)),
    "relu + residual": (lambda y, a, b: F.relu(y) + b, ("relu", False, True)),
    "mul + residual, read twice": (lambda y, a, b: (lambda z: (z, z.view(-1)[:N] @ a.t()))(y * a + b), ("", True, True)),
}
LEFT = {
    "nothing behind it": lambda y, a, b: y,
    "read twice": lambda y, a, b: (y + a, y * b),
    "broadcast": lambda y, a, b: y + a[:1],
    "another dtype": lambda y, a, b: y + a.float(),
    "with itself": lambda y, a, b: y + y,
    "alpha": lambda y, a, b: torch.add(y, a, alpha=2),
    "unknown function": lambda y, a, b: y * torch.sigmoid(1.702 * y) + a,
    "a view between": lambda y, a, b: y.view(-1) + a.view(-1),
    "a norm reads it": lambda y, a, b: (lambda z: (z, F.rms_norm(z, (N,))))(y + a),
    "a pointwise kernel reads a view of it": lambda y, a, b: F.relu(y).view(-1).float() * 3,
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    def plan_of(linear):
        qdata = linear.args[1].meta["val"]
        return plan(Call("linear_epilogue", 90, BF16, qdata.shape[0], 64), DispatchConfig())

    monkeypatch.setattr(epilogue, "_plan_of", plan_of)
    calls = []
    rewrite = epilogue._rewrite

    def spy(graph, linear, found, act):
        calls.append((act, found.mul is not None, found.residual is not None))
        rewrite(graph, linear, found, act)

    monkeypatch.setattr(epilogue, "_rewrite", spy)
    return calls


def run(compiled, then, generate=False):
    torch.manual_seed(0)
    model, args = Layer(then), [torch.randn(5, size).to(BF16) for size in (K, N, N)]
    c = compiled(model, *args, generate=generate)
    return c.result, model(*args), c.matches


@pytest.mark.parametrize("name", TAKEN)
def test_taken(compiled, name, on_a_gpu):
    then, found = TAKEN[name]
    got, want, counted = run(compiled, then, generate=name in ("residual", "mul + residual, read twice"))
    assert on_a_gpu == [found]
    assert counted == {"linear_epilogue": 1}
    for y, r in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        assert float((y.double() - r.double()).norm() / r.double().norm()) < 1e-2


@pytest.mark.parametrize("name", LEFT)
def test_left(compiled, name, on_a_gpu):
    got, want, counted = run(compiled, LEFT[name])
    assert counted == {} and on_a_gpu == []
    for y, r in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        assert float((y.double() - r.double()).norm() / r.double().norm()) < 1e-2


def test_the_graph_of_a_cpu_stays_as_it_is(compiled):
    assert run(compiled, TAKEN["silu * mul"][0], generate=True)[2] == {}
