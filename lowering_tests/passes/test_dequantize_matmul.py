"""fp4.dequantize -> matmul becomes fp4.linear / fp4.bmm: which, how often, the graph, and the numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor.formats import nvfp4

fp4 = torch.ops.fp4
N, K, E, M = 48, 64, 3, 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Model(nn.Module):
    """A weight as buffers (static shapes under compile) and a forward given by the test."""

    def __init__(self, body, shape=(N, K), dtype=torch.bfloat16):
        super().__init__()
        for name, part in zip(("q", "s", "g"), nvfp4.quantize(torch.randn(shape) / K**0.5), strict=True):
            self.register_buffer(name, part)
        self.register_buffer("bias", torch.randn(N, dtype=dtype))
        self.body, self.dtype = body, dtype

    def w(self, dtype=None):
        return fp4.dequantize(self.q, self.s, self.g, dtype or self.dtype)

    def forward(self, x):
        return self.body(self, x)


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


FORMS = {
    "x @ w.t()": (lambda m, x: x @ m.w().t(), (M, K), {"dequantize_mm": 1}),
    "x @ w.mT": (lambda m, x: x @ m.w().mT, (M, K), {"dequantize_mm": 1}),
    "permute": (lambda m, x: torch.mm(x, m.w().permute(1, 0)), (M, K), {"dequantize_mm": 1}),
    "transpose": (lambda m, x: torch.mm(x, m.w().transpose(-1, -2)), (M, K), {"dequantize_mm": 1}),
    "materialised transpose": (lambda m, x: torch.mm(x, m.w().t().contiguous()), (M, K), {"dequantize_mm": 1}),
    "F.linear": (lambda m, x: F.linear(x, m.w()), (M, K), {"dequantize_mm": 1}),
    "F.linear, bias": (lambda m, x: F.linear(x, m.w(), m.bias), (M, K), {"dequantize_addmm": 1}),
    "F.linear, bias, 3-D": (lambda m, x: F.linear(x, m.w(), m.bias), (2, M, K), {"dequantize_addmm": 1}),
    "F.linear, 4-D": (lambda m, x: F.linear(x, m.w()), (2, 1, M, K), {"dequantize_mm": 1}),
    "one row": (lambda m, x: F.linear(x, m.w(), m.bias), (1, K), {"dequantize_addmm": 1}),
    "a vector": (lambda m, x: F.linear(x, m.w(), m.bias), (K,), {"dequantize_addmm": 1}),
    "used twice": (lambda m, x: F.linear(x, m.w()) + F.linear(x.relu(), m.w()), (M, K), {"dequantize_mm": 2}),
    "float32, then converted": (lambda m, x: F.linear(x, m.w(torch.float32).to(m.dtype)), (M, K), {"dequantize_mm": 1}),
    "bmm, expanded": (lambda m, x: torch.bmm(x, m.w().t().expand(E, K, N)), (E, M, K), {"dequantize_bmm": 1}),
    "bmm, expanded, then transposed": (lambda m, x: torch.bmm(x, m.w()[None].expand(E, N, K).mT), (E, M, K), {"dequantize_bmm": 1}),
    "matmul, broadcast": (lambda m, x: x @ m.w()[None].mT, (E, M, K), {"dequantize_bmm": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_forms(compiled, form, dtype):
    body, shape, expected = FORMS[form]
    model, x = Model(body, dtype=dtype), torch.randn(shape).to(dtype)
    c = compiled(model, x)
    assert c.matches == expected
    assert "dequantize" not in c.graph
    assert "mm.default" not in c.graph.replace("fp4.bmm.default", "")
    assert c.result.shape == model(x).shape
    assert relative_error(c.result, model(x)) <= TOLERANCE[dtype]


def test_half(compiled):
    model, x = Model(lambda m, x: F.linear(x, m.w(), m.bias), dtype=torch.float16), torch.randn(M, K).half()
    c = compiled(model, x)
    assert c.matches == {"dequantize_addmm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_weight_per_matrix(compiled, dtype):
    model = Model(lambda m, x: torch.bmm(x, m.w().mT), (E, N, K), dtype)
    x = torch.randn(E, M, K).to(dtype)
    c = compiled(model, x)
    assert c.matches == {"dequantize_bmm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[dtype]
    assert_expected_inline(
        c.graph,
        """\
v0 = fp4.bmm.default(in3, in0, in1, in2)
return v0""",
    )


def test_generated_code(compiled):
    """All the way through Inductor: what the lowerings make of the rewritten graph."""
    for body, shape, x_shape in (
        (lambda m, x: F.linear(x, m.w(), m.bias).relu(), (N, K), (2, M, K)),
        (lambda m, x: torch.bmm(x, m.w().mT), (E, N, K), (E, M, K)),
    ):
        model, x = Model(body, shape), torch.randn(x_shape).bfloat16()
        c = compiled(model, x, generate=True)
        assert sum(c.matches.values()) == 1
        assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_another_user_keeps_the_dequantize(compiled):
    model, x = Model(lambda m, x: F.linear(x, m.w()) * m.w().sum()), torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"dequantize_mm": 1}
    assert c.graph.count("fp4.dequantize.default") == 1
    assert c.graph.count("fp4.linear.default") == 1
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_dynamic_rows_and_batch(compiled):
    x = torch.randn(E, M, K).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    assert compiled(Model(lambda m, x: F.linear(x, m.w())), x).matches == {"dequantize_mm": 1}
    expanded = Model(lambda m, x: torch.bmm(x, m.w().t().expand(x.shape[0], K, N)))
    x = torch.randn(E, M, K).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    assert compiled(expanded, x).matches == {"dequantize_bmm": 1}


NOT_A_LINEAR = {
    "contracts over n": (lambda m, x: x @ m.w(), (K, K), (M, K)),
    "contracts over n, through two transposes": (lambda m, x: x @ m.w().t().contiguous().t(), (K, K), (M, K)),
    "weight on the left": (lambda m, x: m.w() @ x.t(), (K, K), (M, K)),
    "a scaled weight": (lambda m, x: x @ (m.w() * 2.0).t(), (N, K), (M, K)),
    "rounded to bfloat16 first": (lambda m, x: x.float() @ m.w(torch.bfloat16).float().t(), (N, K), (M, K)),
    "rounded to float16 first": (lambda m, x: x @ m.w(torch.float16).to(m.dtype).t(), (N, K), (M, K)),
    "experts in another order": (lambda m, x: torch.bmm(x, m.w().permute(2, 1, 0)), (16, 16, 16), (16, M, 16)),
}


@pytest.mark.parametrize("form", NOT_A_LINEAR)
def test_left_alone(compiled, form):
    body, weight, activation = NOT_A_LINEAR[form]
    model, x = Model(body, weight), torch.randn(activation).bfloat16()
    c = compiled(model, x)
    assert c.matches == {}
    assert "fp4.linear" not in c.graph
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_an_operand_that_is_part_of_a_split(compiled):
    """Looking for the weight ends there; it once ended with an AttributeError."""
    model = Model(lambda m, x: torch.bmm(*x.split(1)) + F.linear(x[0, 0], m.w()).sum())
    x = torch.randn(2, K, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"dequantize_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_a_bias_that_is_not_one(compiled):
    """addmm of a full matrix is not a bias; the product is left to Inductor rather than guessed at."""
    model = Model(lambda m, x: torch.addmm(x[:, :N], x, m.w().t()))
    x = torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_gradient_of_the_activation(compiled):
    """The forward is rewritten, the backward (a contraction over n) is not."""
    from fp4_inductor import passes

    model = Model(lambda m, x: F.linear(x, m.w()), dtype=torch.float32)
    x = torch.randn(M, K, requires_grad=True)
    passes.reset_matches()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(model, fullgraph=True)(x).square().sum().backward()
    assert passes.matches() == {"dequantize_mm": 1}
    got, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert relative_error(got, x.grad) <= 1e-5


def test_graphs(compiled):
    """The same text on every supported torch."""
    model = Model(lambda m, x: F.relu(F.linear(x, m.w(), m.bias)))
    x = torch.randn(2, M, K).bfloat16()
    torch._dynamo.mark_dynamic(x, 1)
    text = compiled(model, x).graph
    assert_expected_inline(
        text,
        """\
v0 = <built-in function mul>(2, in4)
v1 = aten.reshape.default(in5, [v0, 64])
v2 = fp4.linear.default(v1, in0, in1, in2, in3)
v3 = aten.reshape.default(v2, [2, in4, 48])
v4 = aten.relu.default(v3)
return v4""",
    )


def test_frozen_weight_stays_quantized(compiled):
    """freezing=True would fold dequantize(constants) into a dense weight of four times the size."""
    model, x = Model(lambda m, x: F.linear(x, m.w()) * m.w().sum()).eval(), torch.randn(M, K).bfloat16()
    c = compiled(model, x, config={"freezing": True})
    assert c.graph.count("fp4.dequantize.default") == 1
    assert c.matches == {"dequantize_mm": 1}
