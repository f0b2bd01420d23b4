"""fp4.sparse_dequantize -> matmul becomes fp4.sparse_linear: the passes of the dense op, on the sparse one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor import Sparse24NVFP4Tensor
from fp4_inductor.formats import sparse24

fp4 = torch.ops.fp4
N, K, E, M = 48, 64, 3, 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Model(nn.Module):
    """A sparse weight as buffers and a forward given by the test."""

    def __init__(self, body, shape=(N, K), dtype=torch.bfloat16):
        super().__init__()
        w = torch.randn(shape) / K**0.5
        for name, part in zip("vmsg", sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w)), strict=True):
            self.register_buffer(name, part)
        self.register_buffer("bias", torch.randn(N, dtype=dtype))
        self.body, self.dtype = body, dtype

    def w(self, dtype=None):
        return fp4.sparse_dequantize(self.v, self.m, self.s, self.g, dtype or self.dtype)

    def forward(self, x):
        return self.body(self, x)


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


FORMS = {
    "x @ w.t()": (lambda m, x: x @ m.w().t(), (M, K), "mm"),
    "materialised transpose": (lambda m, x: torch.mm(x, m.w().t().contiguous()), (M, K), "mm"),
    "F.linear, bias, 3-D": (lambda m, x: F.linear(x, m.w(), m.bias), (2, M, K), "addmm"),
    "a vector": (lambda m, x: F.linear(x, m.w(), m.bias), (K,), "addmm"),
    "float32, then converted": (lambda m, x: F.linear(x, m.w(torch.float32).to(m.dtype)), (M, K), "mm"),
    "matmul, broadcast": (lambda m, x: x @ m.w()[None].mT, (E, M, K), "bmm"),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_forms(compiled, form, dtype):
    body, shape, kind = FORMS[form]
    model, x = Model(body, dtype=dtype), torch.randn(shape).to(dtype)
    c = compiled(model, x)
    assert c.matches == {f"sparse_dequantize_{kind}": 1}
    assert "dequantize" not in c.graph
    assert "mm.default" not in c.graph
    assert relative_error(c.result, model(x)) <= TOLERANCE[dtype]


def test_the_graph(compiled):
    c = compiled(Model(lambda m, x: F.linear(x, m.w(), m.bias)), torch.randn(M, K).bfloat16())
    assert_expected_inline(
        c.graph,
        """\
v0 = fp4.sparse_linear.default(in5, in0, in1, in2, in3, in4)
return v0""",
    )


def test_one_weight_per_matrix_is_decompressed(compiled):
    model, x = Model(lambda m, x: torch.bmm(x, m.w().mT), (E, N, K), torch.float32), torch.randn(E, M, K)
    c = compiled(model, x)
    assert c.matches == {"sparse_dequantize_bmm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.float32]
    assert_expected_inline(
        c.graph,
        """\
v0 = fp4.sparse_decompress.default(in0, in1)
v1 = fp4.bmm.default(in4, v0, in2, in3)
return v1""",
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x @ m.w()[:, :K].abs().t(),
        lambda m, x: x @ m.w(torch.float16).to(m.dtype).t(),  # rounded twice
        lambda m, x: F.linear(x, m.w()[1:]),
        lambda m, x: x[:, :N] @ m.w(),
    ],
)
def test_what_is_no_product_by_the_whole_weight_stays(compiled, body):
    model, x = Model(body), torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {}
    assert "sparse_dequantize" in c.graph
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_a_parameter_of_the_subclass_ends_in_the_op(compiled):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(Sparse24NVFP4Tensor.from_dense(torch.randn(N, K), "magnitude"), requires_grad=False)

        def forward(self, x):
            return F.relu(x @ self.weight.t()) + self.weight.dequantize().sum()

    layer, x = Layer(), torch.randn(M, K)
    c = compiled(layer, x)
    assert c.graph.count("fp4.sparse_linear.default") == 1
    assert relative_error(c.result, layer(x)) <= 1e-5


def test_constants_are_not_folded_into_a_dense_weight(compiled):
    model, x = Model(lambda m, x: F.linear(x, m.w(), m.bias), dtype=torch.float32).eval(), torch.randn(M, K)
    c = compiled(model, x, config={"freezing": True}, generate=True)
    assert c.matches == {"sparse_dequantize_addmm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.float32]
