"""act(gate) * up of one weight becomes fp4.linear_glu, whatever torch made of the activation, and nothing else does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_inductor
from fp4_inductor.formats import nvfp4
from fp4_inductor.passes import matches, reset_matches

BF16 = torch.bfloat16
K, INNER = 64, 48

KNOWN = {
    "silu": F.silu,
    "silu, written out": lambda z: z * torch.sigmoid(z),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
}
OTHER = {
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu squared": lambda z: F.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "silu, clamped": lambda z: F.silu(z.clamp(max=7.0)),
    "row softmax": lambda z: torch.softmax(z, -1),
}


class Gated(nn.Module):
    def __init__(self, act, bias=False, padded=False):
        super().__init__()
        inner = INNER + 8 if padded else INNER  # off the 16 rows: not adjacent
        self.gate_proj, self.up_proj = nn.Linear(K, inner, bias=bias), nn.Linear(K, inner, bias=bias)
        self.act = act
        for p in self.parameters():
            p.data = torch.randn(p.shape) / 4

    def forward(self, x):
        return self.act(self.gate_proj(x)) * self.up_proj(x)


class Fused(nn.Module):
    """Phi3's way."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(K, 2 * INNER, bias=True)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return up * F.silu(gate)


def counted(model, x):
    reset_matches()
    y = torch.compile(model, fullgraph=True)(x)
    return y, matches()


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", KNOWN)
def test_known_activations(name):
    for dtype, bound in ((BF16, 8e-3), (torch.float32, 1e-5)) if name == "silu" else ((BF16, 8e-3),):
        model = fp4_inductor.quantize_model(Gated(KNOWN[name], bias=True).to(dtype), progress=False)
        x = torch.randn(2, 5, K).to(dtype)
        y, found = counted(model, x)
        assert found == {"siblings": 1, "linear_glu": 1}
        assert distance(y, model(x)) < bound


@pytest.mark.parametrize("name", OTHER)
def test_other_activations_stay(compiled, name):
    model = fp4_inductor.quantize_model(Gated(OTHER[name]).to(BF16), progress=False)
    x = torch.randn(5, K).to(BF16)
    c = compiled(model, x)
    assert c.matches == {"siblings": 1}
    assert distance(c.result, model(x)) < 8e-3


def test_a_fused_weight():
    model = fp4_inductor.quantize_model(Fused().to(BF16), progress=False)
    x = torch.randn(3, K).to(BF16)
    y, found = counted(model, x)
    assert found == {"linear_glu": 1}
    assert distance(y, model(x)) < 8e-3


def quantized():
    return fp4_inductor.quantize_model(Gated(F.silu).to(BF16), progress=False)


FORMS = {
    "the gate is returned too": lambda m, x: (F.silu(m.gate_proj(x)) * m.up_proj(x), m.gate_proj(x)),
    "up is used twice": lambda m, x: F.silu(m.gate_proj(x)) * (u := m.up_proj(x)) + u,
    "act(up) * gate": lambda m, x: F.silu(m.up_proj(x)) * m.gate_proj(x),
    "the activation is used twice": lambda m, x: (a := F.silu(m.gate_proj(x))) * m.up_proj(x) + a,
    "different inputs": lambda m, x: F.silu(m.gate_proj(x)) * m.up_proj(x + 1),
    "a product of more": lambda m, x: F.silu(m.gate_proj(x) * x[:, :INNER]) * m.up_proj(x),
    "gate times gate": lambda m, x: F.silu(m.gate_proj(x)) * m.gate_proj(x) + m.up_proj(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_only_looks_like_it_stays(compiled, form):
    model, x = quantized(), torch.randn(3, K).to(BF16)
    c = compiled(FORMS[form], model, x)
    assert "linear_glu" not in c.matches
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (c.result, FORMS[form](model, x))), strict=True):
        assert distance(a, b) < 8e-3


def test_padding_between_gate_and_up_stays(compiled):
    model = fp4_inductor.quantize_model(Gated(F.silu, padded=True).to(BF16), progress=False)
    x = torch.randn(3, K).to(BF16)
    c = compiled(model, x)
    assert c.matches == {"siblings": 1}
    assert distance(c.result, model(x)) < 8e-3


def test_symbolic_rows_and_explain():
    model = quantized()
    compiled = torch.compile(model, dynamic=True)
    for m in (2, 7, 40):
        x = torch.randn(m, K).to(BF16)
        assert distance(compiled(x), model(x)) < 8e-3
    found = fp4_inductor.explain(compiled, torch.randn(3, K).to(BF16))
    assert found.matches == {"siblings": 1, "linear_glu": 1}
    assert "silu(gate) * up is pointwise work behind it" in str(found)
    assert {row.module for row in found.rows} == {"gate_proj", "up_proj"}


ROWS = {"halves": ([0, INNER], {"linear_glu": 1}), "other members": ([0, 32], {}), "three": ([0, INNER, 2 * INNER - 16], {})}


@pytest.mark.parametrize("case", ROWS)
def test_a_weight_with_several_global_scales(compiled, case):
    """fp4.linear with a scale for each half is a gated product; with scales of other rows it is not."""
    rows, found = ROWS[case]
    q, s, g = nvfp4.quantize(torch.randn(2 * INNER, K) / 8)
    scales = g * torch.tensor([1.0, 3.0, 0.3])[: len(rows)]

    def model(x):
        gate, up = torch.ops.fp4.linear(x, q, s, scales, None, "auto", rows).chunk(2, -1)
        return F.silu(gate) * up

    x = torch.randn(5, K).to(BF16)
    c = compiled(model, x)
    assert c.matches == found
    assert distance(c.result, model(x)) < 8e-3


def test_products_with_several_global_scales_are_no_siblings(compiled):
    """They are several layers already; a slice of such a weight would take another member's scale."""
    q, s, g = nvfp4.quantize(torch.randn(4 * INNER, K) / 8)
    scales = g * torch.tensor([1.0, 3.0])

    def model(x):
        half = 2 * INNER
        return [torch.ops.fp4.linear(x, q[a : a + half], s[a : a + half], scales, None, "auto", [0, 16]) for a in (0, half)]

    x = torch.randn(5, K).to(BF16)
    c = compiled(model, x)
    assert c.matches == {}
    assert all(torch.equal(a, b) for a, b in zip(c.result, model(x), strict=True))
