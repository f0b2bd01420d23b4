"""Generated CUDA code of a mixture of experts between two attentions: the router, its norm, the experts and the residual are part of one launch. No GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Experts
from fp4_inductor.modules.experts import FP4ExpertWeight
from fp4_inductor.ops.activation import Activation
from lowering_tests.lowerings.test_chain_code import BF16, LAYER, D, Decoder, DecoderLayer, K, arguments, compiled, launched, normalized

E, TOP_K, INNER = 16, 4, 512


class MixtureLayer(DecoderLayer):
    """A layer of Qwen3-MoE over a cache."""

    def __init__(self, experts=E, inner=INNER, bias=False, activation=None):
        super().__init__()
        del self.gate, self.up, self.down
        self.router = nn.Parameter(torch.empty(experts, K, dtype=BF16, device="cuda"), requires_grad=False)
        weights = (FP4ExpertWeight(experts, n, k, bias=bias, device="cuda") for n, k in ((2 * inner, K), (K, inner)))
        self.experts = FP4Experts(*weights, activation or Activation("silu"))

    def forward(self, x, keys, values, arrivals, position):
        h = normalized(x, self.first)
        q, k, v = (f(h).view(1, 1, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = torch.ops.fp4.cached_attention(q, k, v, keys, values, position, arrivals=arrivals)
        x = x + self.o(attended.reshape(1, 1, -1))
        h = normalized(x, self.second).view(-1, K)
        return x + self.mix(h).reshape(1, 1, K)

    def mix(self, h):
        logits = F.linear(h, self.router)
        weights, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), TOP_K, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
        return self.experts(h, ids, weights)


class MixtureDecoder(Decoder):
    def __init__(self, layers=2, build=MixtureLayer):
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(build() for _ in range(layers))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64, device="cuda"))


def test_two_launches_a_layer():
    body, entries, counted, left = compiled(MixtureDecoder)
    assert launched(body) == ["linear_gemv", *LAYER, *LAYER]
    assert (counted["mixture"], counted["linear_chain"], left) == (2, 2, [])
    chains = [e for e in entries if e.op == "fp4.linear_chain"]
    assert [e.module for e in chains[:4]] == ["layers.0.o", "layers.0.experts", "layers.0.experts", "layers.1.q"]
    assert chains[1].note == "product 2 of 4 of one launch; the RMSNorm of its input is in the kernel; 4 of 16 experts, chosen in the kernel; silu(gate) * up"
    assert chains[2].note == "product 3 of 4 of one launch; in the kernel: + residual"
    first, last = arguments(body, "linear_chain")
    assert "[1, 4, 1, 1]" in first and "[-1, -1, 0, -1]" in first, "gate and up are product 1, down adds the result of product 0"
    assert "[1, 4, 1, 1]" in last and "[-1, -1, 0]" in last


class Biased(MixtureLayer):
    def __init__(self):
        super().__init__(bias=True)


class Many(MixtureLayer):
    def __init__(self):
        super().__init__(experts=520, inner=64)


class Limited(MixtureLayer):
    def __init__(self):
        super().__init__(activation=Activation("silu", limit=7.0))


class Unnormed(MixtureLayer):
    """The experts read something else than the router does."""

    def mix(self, h):
        logits = F.linear(h, self.router)
        weights, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), TOP_K, dim=-1)
        return self.experts(h * 2, ids, weights.to(logits.dtype))


class Shared(MixtureLayer):
    """Something else reads the choice."""

    def mix(self, h):
        logits = F.linear(h, self.router)
        weights, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), TOP_K, dim=-1)
        return self.experts(h, ids, weights.to(logits.dtype)) * weights.sum().to(h.dtype)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Biased, "experts have biases"), (Many, "520 experts: one launch takes 512"), (Limited, "one launch has no experts with"),
        (Unnormed, "no RMSNorm of one weight stands in front of the router and the experts"),
        (Shared, "its experts are chosen by something else than fp4.router"),
    ],
)  # fmt: skip
def test_what_stays_apart(build, reason):
    body, _, counted, left = compiled(lambda: MixtureDecoder(1, build))
    assert "mixture" not in counted and "moe" in launched(body)
    assert any(found.startswith(reason) for found in left), left
