"""The graph that is left of each form: the same text on every supported torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from moe_activations import ACTIVATIONS
from moe_layers import E, H, K, Layer, T, batched_mm, gathered, grouped_mm, loop_over_experts, one_hot, scattered, weight_on_input

from fp4_inductor.passes.missed import listen


def text(compiled, body, dtype=torch.float32, *, dynamic=False, gated=True):
    """The layer's graph with a router of two operations."""
    torch.manual_seed(0)
    layer, x = Layer(body, dtype, gated), torch.randn(T, H).to(dtype)
    layer.route = lambda x: torch.topk(x[:, :E], K)[::-1]
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return compiled(layer, x).graph


def test_batched_mm(compiled):
    """Symbolic T; the clamp of 5.17 is part of the model's meaning and stays."""
    assert_expected_inline(
        text(compiled, lambda m, x: batched_mm(m, x, None), dynamic=True),
        """\
v0 = aten.slice.Tensor(in1, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in1, v3, v2, in2, in3, in4, in5, in6, in7)
return v4""",
    )
    assert_expected_inline(
        text(compiled, batched_mm, dynamic=True),
        """\
v0 = aten.slice.Tensor(in1, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = aten.reshape.default(v3, [-1])
v5 = aten.clamp_min.default(v4, 0)
v6 = aten.clamp_max.default(v5, 5)
v7 = aten.reshape.default(v6, [-1, 2])
v8 = fp4.moe.default(in1, v7, v2, in2, in3, in4, in5, in6, in7)
return v8""",
    )


def test_grouped_mm(compiled):
    """Sort, histogram and un-sorting are gone; the masks are what fp4.moe does by itself."""
    plain = text(compiled, lambda m, x: grouped_mm(m, x, False), torch.bfloat16, dynamic=True)
    assert_expected_inline(
        plain,
        """\
v0 = aten.slice.Tensor(in1, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in1, v3, v2, in2, in3, in4, in5, in6, in7)
return v4""",
    )
    assert text(compiled, grouped_mm, torch.bfloat16, dynamic=True) == plain


def test_gpt_oss(compiled):
    assert_expected_inline(
        text(compiled, gathered(ACTIVATIONS["gpt-oss"][0], bias=True), torch.bfloat16),
        """\
v0 = aten.slice.Tensor(in0, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in0, v3, v2, in1, in2, in3, in5, in6, in7, in4, in8, swiglu_oai, 1.702, 7.0, True)
return v4""",
    )


def test_without_a_gate(compiled):
    assert_expected_inline(
        text(compiled, gathered(ACTIVATIONS["relu2, no gate"][0]), gated=False),
        """\
v0 = aten.slice.Tensor(in0, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in0, v3, v2, in1, in2, in3, in4, in5, in6, None, None, relu2)
return v4""",
    )


def test_weight_on_input(compiled):
    assert_expected_inline(
        text(compiled, weight_on_input),
        """\
v0 = aten.slice.Tensor(in0, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in0, v3, v2, in1, in2, in3, in4, in5, in6, None, None, silu, 1.0, None, False, True)
return v4""",
    )


def test_dense_forms(compiled):
    dense = text(compiled, scattered)
    assert_expected_inline(
        dense,
        """\
v0 = aten.slice.Tensor(in0, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = fp4.moe.default(in0, v3, v2, in1, in2, in3, in5, in6, in7, in4, in8)
return v4""",
    )
    loop = text(compiled, loop_over_experts)
    assert_expected_inline(
        loop,
        """\
v0 = aten.slice.Tensor(in0, 1, 0, 6)
v1 = aten.topk.default(v0, 2)
v2 = <built-in function getitem>(v1, 0)
v3 = <built-in function getitem>(v1, 1)
v4 = aten.full.default([7, 64], 0, dtype=torch.float32, layout=torch.strided, pin_memory=False)
v5 = fp4.moe.default(in0, v3, v2, in1, in2, in3, in4, in5, in6)
return v5""",
    )
    assert "= fp4.moe.default(in0, v3, v2, in1, in2, in3, in4, in5, in6)\nreturn" in text(compiled, one_hot)  # behind one_hot's own checks


def test_routing_from_slices(compiled):
    """Ids and weights that are columns of a larger tensor are taken from it."""

    def body(m, x):
        m.route = lambda x: (x[:, :K].long().abs() % E, x[:, K : 2 * K])
        return batched_mm(m, x)

    assert_expected_inline(
        text(compiled, body, dynamic=True),
        """\
v0 = aten.slice.Tensor(in1, 1, 0, 2)
v1 = prims.convert_element_type.default(v0, torch.int64)
v2 = aten.abs.default(v1)
v3 = aten.remainder.Scalar(v2, 6)
v4 = aten.reshape.default(v3, [-1])
v5 = aten.clamp_min.default(v4, 0)
v6 = aten.clamp_max.default(v5, 5)
v7 = aten.reshape.default(v6, [-1, 2])
v8 = aten.slice.Tensor(in1, 1, 2, 4, 1)
v9 = fp4.moe.default(in1, v7, v8, in2, in3, in4, in5, in6, in7)
return v9""",
    )


def test_unknown_activation_still_gathers_packed_weights(compiled):
    """Never all experts: codes and scales of the chosen ones are taken, and only those are dequantized."""

    def body(m, x):
        ids, w = m.route(x)
        s = ids.reshape(-1)
        z = torch.bmm(m.gate_up()[s], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(m.down()[s], F.mish(z).chunk(2, -1)[0].unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1).unsqueeze(-1)).view(x.shape[0], K, H).sum(dim=1)

    with listen() as missed:
        graph = text(compiled, body)
    assert len(missed) == 2
    lines = [line for line in graph.splitlines() if "fp4." in line or "aten.index" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
v5 = aten.index.Tensor(in1, [v4])
v6 = aten.index.Tensor(in2, [v4])
v7 = aten.index.Tensor(in3, [v4])
v8 = fp4.dequantize.default(v5, v6, v7, torch.float32)
v24 = aten.index.Tensor(in4, [v4])
v25 = aten.index.Tensor(in5, [v4])
v26 = aten.index.Tensor(in6, [v4])
v27 = fp4.dequantize.default(v24, v25, v26, torch.float32)""",
    )
