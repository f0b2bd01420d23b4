"""Every spelling of an MoE layer becomes one fp4.moe; what only looks like one does not, and explain() is told why."""

from __future__ import annotations

import pytest
import torch
from moe_activations import ACTIVATIONS, UNKNOWN_ACTIVATIONS
from moe_layers import FORMS, NOT_A_LAYER, E, H, I, Layer, T, gathered, swiglu

from fp4_inductor import explain
from fp4_inductor.formats import nvfp4
from fp4_inductor.passes.missed import listen

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("form", FORMS)
def test_forms(compiled, form):
    body, counter = FORMS[form]
    dtype = torch.bfloat16 if form.startswith("grouped") else torch.float32  # torch's grouped product takes no other
    layer, x = Layer(body, dtype), torch.randn(T, H).to(dtype)
    torch._dynamo.mark_dynamic(x, 0)
    with listen() as missed, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        c = compiled(layer, x)
    assert c.matches == {counter: 1}
    assert c.graph.count("fp4.") == 1 and "fp4.moe" in c.graph and "nonzero" not in c.graph
    assert not missed
    assert c.result.shape == layer(x).shape
    assert relative_error(c.result, layer(x)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("form", NOT_A_LAYER)
def test_left_alone(compiled, form):
    body, reason = NOT_A_LAYER[form]
    dtype = torch.bfloat16 if form.startswith("grouped") else torch.float32  # torch's grouped product takes no other
    layer, x = Layer(body, dtype), torch.randn(T, H).to(dtype)
    with listen() as missed:
        c = compiled(layer, x)
    assert "fp4.moe." not in c.graph
    assert not {m for m in c.matches if m.startswith("moe_") and m != "moe_gather"}
    assert relative_error(c.result, layer(x)) <= TOLERANCE[dtype]
    if "fp4.dequantize" in c.graph:
        assert len(missed) == c.graph.count("fp4.dequantize")
        assert all(m.reason for m in missed) and any(reason in m.reason for m in missed), missed


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(compiled, name):
    act, gated, arguments = ACTIVATIONS[name]
    layer, x = Layer(gathered(act), gated=gated), torch.randn(T, H) * 3
    c = compiled(layer, x)
    assert c.matches == {"moe_batched_mm": 1}
    assert _activation(c.graph) == arguments
    assert relative_error(c.result, layer(x)) <= TOLERANCE[torch.float32]


def _activation(graph):
    """The four arguments of fp4.moe that describe it, defaults filled in."""
    line = next(line for line in graph.splitlines() if "fp4.moe" in line)
    given = line[line.index("(") + 1 : -1].split(", ")[11:]
    name, alpha, limit, interleaved = (*given, *("silu", "1.0", "None", "False")[len(given) :])
    return name, float(alpha), None if limit == "None" else float(limit), interleaved == "True"


@pytest.mark.parametrize("name", UNKNOWN_ACTIVATIONS)
def test_unknown_activations_are_refused_by_name(compiled, name):
    act, gated, reason = UNKNOWN_ACTIVATIONS[name]
    layer, x = Layer(gathered(act), gated=gated), torch.randn(T, H)
    with listen() as missed:
        c = compiled(layer, x)
    assert "fp4.moe." not in c.graph and c.matches == {"moe_gather": 2}
    assert len(missed) == 2 and all(reason in m.reason for m in missed), missed
    assert relative_error(c.result, layer(x)) <= TOLERANCE[torch.float32]


def test_explain_names_what_is_left_dense():
    """In words, with the shape; and nothing where nothing is left."""
    parts = nvfp4.quantize(torch.randn(E, H, I))
    explanation = explain(torch.compile(lambda x: torch.ops.fp4.dequantize(x, *parts[1:], torch.float32)), parts[0])
    assert [m.shape for m in explanation.missed] == [f"[{E}, {H}, {I}]"]
    assert "left dense: dequantize" in explanation.text(1000)
    assert "is dequantized: nothing downstream of it weights and sums experts" in explanation.text(1000)
    linear = explain(torch.compile(lambda x: torch.ops.fp4.linear(x, *(p[0] for p in parts))), torch.randn(2, I))
    assert linear.missed == [] and "left dense" not in str(linear)


BOTH = ("gate_up", "down")
SPARSE = [
    *((form, BOTH) for form in ("dequantize, then gather", "gather, then dequantize", "index_select", "one-hot", "loop over slots", "loop over packed experts",
                                "batched_mm, clamped", "grouped_mm, masked")),
    ("biases", ("gate_up",)), ("gather, then dequantize", ("down",)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "sparse"), SPARSE)
def test_sparse_experts(compiled, form, sparse):
    """The forms of dense experts on 2:4-sparse ones, or on one sparse and one dense weight: the same op, with their metadata."""
    body, counter = FORMS[form]
    dtype = torch.bfloat16 if form.startswith("grouped") else torch.float32
    layer, x = Layer(body, dtype, sparse=sparse), torch.randn(T, H).to(dtype)
    torch._dynamo.mark_dynamic(x, 0)
    with listen() as missed:
        c = compiled(layer, x)
    assert c.matches == {counter: 1}
    assert c.graph.count("fp4.") == 1 and "fp4.moe" in c.graph
    assert not missed
    assert relative_error(c.result, layer(x)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("form", [f for f in NOT_A_LAYER if not f.startswith("grouped")][::4])
def test_sparse_experts_are_left_alone_where_dense_ones_are(compiled, form):
    body, reason = NOT_A_LAYER[form]
    layer, x = Layer(body, sparse=BOTH), torch.randn(T, H)
    with listen() as missed:
        c = compiled(layer, x)
    assert "fp4.moe." not in c.graph
    assert relative_error(c.result, layer(x)) <= TOLERANCE[torch.float32]
    if "dequantize" in c.graph:
        assert any(reason in m.reason for m in missed), missed


def test_metadata_of_other_experts_is_no_layer(compiled):
    """Codes, metadata, scales and global scales must belong to one expert."""

    def body(m, x):
        ids, w = m.route(x)
        z = torch.einsum("th,tkih->tki", x, m.gate_up(ids))
        v, meta, s, g = m.down_v[ids], m.down_m[(ids + 1) % E], m.down_s[ids], m.down_g[ids]
        y = torch.einsum("tki,tkhi->tkh", swiglu(z), torch.ops.fp4.sparse_dequantize(v, meta, s, g, x.dtype))
        return (y * w[..., None]).sum(1)

    layer, x = Layer(body, sparse=BOTH), torch.randn(T, H)
    with listen() as missed:
        c = compiled(layer, x)
    assert "fp4.moe." not in c.graph
    assert any("taken from different experts" in m.reason for m in missed), missed
    assert relative_error(c.result, layer(x)) <= TOLERANCE[torch.float32]
