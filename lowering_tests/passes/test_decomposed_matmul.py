"""CUDA forms, without a GPU: one-row matmuls that Inductor decomposes, and columns that it pads."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4_inductor import passes

fake_cuda = pytest.importorskip("fake_cuda", reason="needs triton")
pytest.importorskip("triton")

fp4, aten = torch.ops.fp4, torch.ops.aten
N, K, E = 48, 64, 3


class Model(nn.Module):
    def __init__(self, dtype, dequantized_to, experts):
        super().__init__()
        lead = () if experts is None else (experts,)
        self.register_buffer("q", torch.empty(*lead, N, K // 2, dtype=torch.uint8, device="cuda"))
        self.register_buffer("s", torch.empty(*lead, N, K // 16, dtype=torch.float8_e4m3fn, device="cuda"))
        self.register_buffer("g", torch.empty(lead, device="cuda"))
        self.dtype, self.dequantized_to = dtype, dequantized_to

    def forward(self, x):
        w = fp4.dequantize(self.q, self.s, self.g, self.dequantized_to).to(self.dtype)
        return torch.relu(x @ w.mT)


class _Enough(BaseException):
    """Raised after the passes: there is no GPU to go on with."""


def _only_the_passes(module, example_inputs):
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx

    def inner(gm, inputs, **kwargs):
        _recursive_post_grad_passes(gm, is_inference=True)
        raise _Enough

    return compile_fx(module, example_inputs, inner_compile=inner)


def compile_fake(dtype, dequantized_to, experts, shape, tuning):
    config = {"coordinate_descent_tuning": tuning, "shape_padding": False, "force_disable_caches": True}
    passes.reset_matches()
    torch._dynamo.reset()
    with fake_cuda.pretend_cuda(), FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad(), inductor_config.patch(config), contextlib.suppress(_Enough):
        x = torch.empty(shape, dtype=dtype, device="cuda")
        torch.compile(Model(dtype, dequantized_to, experts), fullgraph=True, backend=_only_the_passes)(x)
    return passes.matches()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("via", ["same", "float32"])
def test_one_row_under_coordinate_descent_tuning(dtype, via):
    source = dtype if via == "same" else torch.float32
    assert compile_fake(dtype, source, None, (1, K), True) == {"dequantize_mm_decomposed": 1}
    assert compile_fake(dtype, source, E, (E, 1, K), True) == {"dequantize_bmm_decomposed": 1}


def test_more_rows_or_no_tuning():
    assert compile_fake(torch.bfloat16, torch.bfloat16, None, (5, K), True) == {"dequantize_mm": 1}
    assert compile_fake(torch.bfloat16, torch.bfloat16, None, (1, K), False) == {"dequantize_mm": 1}


def graph_of(build):
    """A post-grad graph by hand, with fake values, after our patterns."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    graph, mode = torch.fx.Graph(), FakeTensorMode()

    def call(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        with mode:
            node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def given(name, *shape, dtype):
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    parts = [given("q", 51, 32, dtype=torch.uint8), given("s", 51, 4, dtype=torch.float8_e4m3fn), given("g", dtype=torch.float32)]
    graph.output(build(call, given, parts))
    module = torch.fx.GraphModule({}, graph)
    passes.reset_matches()
    pass_patterns[0].apply(module.graph)
    module.graph.lint()
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("bias", [False, True])
def test_columns_padded_by_pad_mm(bias):
    import torch._inductor.compile_fx

    def build(call, given, parts):
        x = given("x", 64, 64, dtype=torch.bfloat16)
        w = call(aten.permute.default, call(fp4.dequantize.default, *parts, torch.bfloat16), [1, 0])
        w = call(aten.constant_pad_nd.default, w, [0, 5, 0, 0])
        if bias:
            zeros = call(aten.full.default, [5], 0, dtype=torch.bfloat16)
            b = call(aten.cat.default, [given("b", 51, dtype=torch.bfloat16), zeros])
            product = call(aten.addmm.default, b, x, w)
        else:
            product = call(aten.mm.default, x, w)
        return call(aten.slice.Tensor, product, 1, 0, -5)

    targets = graph_of(build)
    assert targets == [fp4.linear.default, aten.constant_pad_nd.default, aten.slice.Tensor]
    assert passes.matches() == {"dequantize_addmm" if bias else "dequantize_mm": 1}


def test_padding_that_is_not_zero_columns():
    import torch._inductor.compile_fx

    def build(call, given, parts):
        x = given("x", 64, 64, dtype=torch.bfloat16)
        w = call(aten.permute.default, call(fp4.dequantize.default, *parts, torch.bfloat16), [1, 0])
        return call(aten.mm.default, x, call(aten.constant_pad_nd.default, w, [0, 5, 0, 0], 1.0))

    assert aten.mm.default in graph_of(build)
    assert passes.matches() == {}


def test_a_write_between_decoding_and_matmul():
    """Rewriting would read the weight after the write instead of before it."""
    import torch._inductor.compile_fx

    def build(call, given, parts, write=True):
        x = given("x", 64, 64, dtype=torch.bfloat16)
        w = call(aten.permute.default, call(fp4.dequantize.default, *parts, torch.bfloat16), [1, 0])
        if write:
            call(aten.copy_.default, parts[0], given("other", 51, 32, dtype=torch.uint8))
        return call(aten.mm.default, x, w)

    assert aten.mm.default in graph_of(build)
    assert passes.matches() == {}
    assert aten.mm.default not in graph_of(lambda *a: build(*a, write=False))


def test_sums_that_are_no_matmul():
    """sum(a * b) along another dimension, or of operands broadcast the other way round."""
    import torch._inductor.compile_fx

    def build(dims):
        def inner(call, given, parts):
            x = given("x", 1, 64, dtype=torch.bfloat16)
            w = call(aten.permute.default, call(fp4.dequantize.default, *parts, torch.bfloat16), [1, 0])
            product = call(aten.mul.Tensor, call(aten.unsqueeze.default, x, 2), call(aten.unsqueeze.default, w, 0))
            return call(aten.sum.dim_IntList, product, dims)

        return inner

    assert fp4.linear.default in graph_of(build([1]))
    for dims in ([0], [2], [1, 2], [-1]):
        assert fp4.linear.default not in graph_of(build(dims))
