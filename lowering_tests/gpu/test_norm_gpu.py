"""Linear layers whose kernel computes the RMSNorm in front of them, on a GPU: numbers, replays, programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import pack_siblings
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.passes import matches, missed, reset_matches
from lowering_tests.gpu import helpers
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error, weight

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4
EPS = 1e-6


def serving(**options):
    """Kernels of one row that take a norm serve, those that are off by default, too."""
    return helpers.serving(lambda library: library.norm, "linear", **options)


@pytest.fixture(autouse=True)
def _inference():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def rows(k, dtype):
    """Of other sizes than one, so that a norm that is left out shows."""
    return torch.randn(1, k, device=DEVICE).to(dtype) * 7, (torch.randn(k, device=DEVICE) / 2).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (1000, 1024), (66, 128)])
def test_against_float64(n, k, dtype):
    """Each op, with both kinds of norm, with and without a bias and several global scales."""
    q, s, g = weight(n, k)
    x, w = rows(k, dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype)
    third = n // 3
    several = torch.stack([g, 3 * g, g / 5])
    calls = {
        "norm_linear": [(q, s, g, None), (q, s, g, bias), (q, s, several, bias, "auto", [0, third, 2 * third])],
        "norm_linear_siblings": [(q, s, several, bias, [0, third, third, 2 * third, 2 * third, n])],
        "norm_linear_glu": [(q, s, g, None, "silu"), (q, s, torch.stack([g, 3 * g]), bias, "gelu_tanh")],
    }
    with serving():
        for name, given in calls.items():
            contract = CONTRACTS[name]
            for rest in given:
                for offset in (0.0, 1.0):
                    torch._dynamo.reset()
                    with listen() as entries:
                        got = torch.compile(lambda x, w, *rest, c=contract, o=offset: c.op(x, w, EPS, o, *rest), fullgraph=True)(x, w, *rest)
                    assert "the RMSNorm of its input is in the kernel" in entries[0].note, (name, entries[0])
                    want = contract.reference(x, w, EPS, offset, *rest)
                    for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (got, want)), strict=True):
                        assert error(a, b.double()) <= 2 * contract.tolerance[dtype], (name, offset, len(rest))


class Layer(nn.Module):
    """A decoder layer without attention: norms, siblings, residuals and a gated MLP. ``offset``: as Gemma writes a norm."""

    def __init__(self, k=1024, inner=3072, dtype=BF16, offset=0.0):
        super().__init__()

        def linear(n, k):
            return FP4Linear.from_weight((torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype))

        self.first, self.second = (nn.Parameter(rows(k, dtype)[1]) for _ in range(2))
        self.q, self.k, self.v, self.o = linear(k, k), linear(k // 4, k), linear(k // 4, k), linear(k, k)
        self.gate, self.up, self.down = linear(inner, k), linear(inner, k), linear(k, inner)
        self.offset = offset
        pack_siblings([self.q, self.k, self.v])
        pack_siblings([self.gate, self.up])

    def norm(self, x, weight):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (x32 * (self.offset + weight.float())).to(x.dtype) if self.offset else weight * x32.to(x.dtype)

    def forward(self, x):
        h = self.norm(x, self.first)
        q, k, v = self.q(h), self.k(h), self.v(h)
        x = x + self.o(torch.tanh(q) * torch.cat([k, v, k, v], -1))
        h = self.norm(x, self.second)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_layers(dtype, offset):
    model = nn.Sequential(*(Layer(dtype=dtype, offset=offset) for _ in range(3)))
    x = rows(1024, dtype)[0]
    want = model(x)
    with serving(), missed.listen() as left:
        reset_matches()
        got = torch.compile(model, fullgraph=True)(x)
    assert {name: matches().get(name) for name in ("norm_linear_siblings", "norm_linear_glu", "linear_epilogue")} == {
        "norm_linear_siblings": 3, "norm_linear_glu": 3, "linear_epilogue": 6,
    }  # fmt: skip
    assert [m for m in left if m.what == missed.APART] == []
    assert error(got, want.double()) <= 3e-2


def test_replays_are_bit_equal_and_early_kernels_compute_the_same():
    model = nn.Sequential(*(Layer() for _ in range(4)))
    with serving():
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        inputs = [rows(1024, BF16)[0] for _ in range(8)]
        first = [compiled(x).clone() for x in inputs]
        for _ in range(200):
            for x, want in zip(inputs, first, strict=True):
                assert torch.equal(compiled(x), want)
    torch._dynamo.reset()
    with serving(early="never"):
        late = torch.compile(model, fullgraph=True)
        assert all(torch.equal(late(x), want) for x, want in zip(inputs, first, strict=True))


def test_more_rows_keep_their_norms_where_halves_are_switched_off():
    model, x = Layer(), torch.randn(5, 1024, device=DEVICE, dtype=BF16)
    with serving(thresholds={"rms": 0}), missed.listen() as left:
        reset_matches()
        got = torch.compile(model, fullgraph=True)(x)
    assert not any("norm" in name for name in matches())
    apart = [m for m in left if m.what == missed.APART]
    assert len(apart) == 2 and all(m.reason.startswith("M is 5: ") for m in apart)
    assert error(got, model(x).double()) <= 3e-2
