"""NVFP4Tensor under torch.compile (fullgraph) and torch.export: as a parameter, in a closure, as an argument."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from fp4_inductor import NVFP4Tensor

N, K, E = 64, 96, 3


def matrix(n=N) -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(n, K) / 9)


def experts() -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(E, N, K) / 9)


class Layer(nn.Module):
    def __init__(self, w=None):
        super().__init__()
        self.weight = nn.Parameter(matrix() if w is None else w, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(N))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def ops_of(program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_parameter_over_many_rows(dynamic):
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    counters.clear()
    with torch.no_grad():
        for m in (3, 2, 5, 64, 17, 1, 0):
            x = torch.randn(m, K)
            assert torch.equal(compiled(x), layer(x)), m
        assert torch.equal(compiled(torch.randn(2, 3, K)), layer(torch.zeros(2, 3, K))) is False
    # static 3, dynamic, 1 and 0, and one for the 3-D input; dynamic=True saves the first
    assert counters["stats"]["unique_graphs"] <= (5 if dynamic is None else 4)
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: F.linear(x, w[8:40]),
        lambda x, w: F.linear(x[:, 16:48], w[:, 16:48]),
        lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
        lambda x, w: torch.addmm(x.new_ones(N), x, w.t()),
    ],
)
def test_closure(fn):
    w = matrix()
    compiled = torch.compile(lambda x: fn(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 9):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), fn(x, w))


def test_closure_through_inductor():
    w = matrix()
    compiled = torch.compile(lambda x: x @ w.t(), fullgraph=True, dynamic=True)
    for m in (5, 9):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), x @ w.t())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, ids: torch.bmm(x, w.mT),
        lambda x, w, ids: torch.bmm(x, w[ids].mT),
        lambda x, w, ids: F.linear(x[0], w[1]),
        lambda x, w, ids: torch.bmm(x, w.index_select(0, ids).transpose(1, 2)),
        lambda x, w, ids: torch.bmm(x[..., :48], w[:, :, 48:].mT),
    ],
)
def test_experts_in_a_closure(fn):
    w, ids = experts(), torch.tensor([2, 0, 1])
    compiled = torch.compile(lambda x, ids: fn(x, w, ids), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 9):
        x = torch.randn(E, m, K)
        assert torch.equal(compiled(x, ids), fn(x, w, ids))


def test_the_weight_as_an_argument_of_any_size():
    compiled = torch.compile(lambda x, w: F.linear(x, w), fullgraph=True, dynamic=True)
    for n, m in ((32, 5), (48, 9), (64, 17)):
        x, w = torch.randn(m, K), matrix(n)
        assert torch.equal(compiled(x, w), F.linear(x, w))


def test_dense_fallback_in_a_graph():
    w = matrix()
    compiled = torch.compile(lambda x: x @ (w + 1)[:, 3:].abs().t(), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K - 3)
    torch.testing.assert_close(compiled(x), x @ (w.dequantize() + 1)[:, 3:].abs().t())


def test_from_dense_and_moves_inside_a_graph():
    def step(x, w):
        q = NVFP4Tensor.from_dense(w)
        return F.linear(x, q.to(torch.float32)), q.dequantize()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, w = torch.randn(4, K), torch.randn(N, K)
    for got, want in zip(compiled(x, w), step(x, w), strict=True):
        assert torch.equal(got, want)


def test_autocast_in_a_graph():
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(x), layer(x)
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    with torch.no_grad():
        assert compiled(x).dtype == torch.float32


def test_training_the_rest_of_the_model():
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, K, requires_grad=True)
    got = torch.autograd.grad(compiled(x).sum(), (x, layer.bias))
    want = torch.autograd.grad(layer(x).sum(), (x, layer.bias))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_cached_graph_without_the_weight_gradient_is_not_reused():
    """requires_grad is part of the cache key: the same layer, first frozen, then not (a stale hit gives grad None)."""
    q, x = matrix(), torch.randn(5, K)
    for requires_grad in (False, True):
        torch._dynamo.reset()
        layer = nn.Linear(K, N, bias=False)
        layer.weight = nn.Parameter(q, requires_grad=requires_grad)
        # backward(gradient) and no bias: nothing but matmuls, so that no C++ is compiled
        torch.compile(layer, fullgraph=True)(x.clone().requires_grad_()).backward(torch.ones(5, N))
        assert (layer.weight.grad is not None) == requires_grad


def test_inference_mode():
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, K)
    with torch.inference_mode():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer, x = Layer().requires_grad_(False), torch.randn(5, K)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
    for m in (2, 5, 17, 512):
        x = torch.randn(m, K)
        assert torch.equal(program.module()(x), layer(x))
    lowered = program.run_decompositions()
    assert ops_of(lowered) == ["fp4.linear.default"]
    assert sorted(t.dtype.itemsize for t in lowered.state_dict.values()) == [1, 1, 4, 4]  # packed, not dense
    buffer = io.BytesIO()
    torch.export.save(lowered, buffer)
    buffer.seek(0)
    x = torch.randn(7, K)
    assert torch.equal(torch.export.load(buffer).module()(x), layer(x))
