"""Generated CUDA code of products that are one launch: fp4.linear_chain between two attentions. No GPU (fake_cuda.py).

The stand-in for a GPU traces no call that writes its inputs, so that the caches and their counters are made in the graph here.
"""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import SiblingWeight, pack_siblings
from fp4_inductor.passes import matches, missed, reset_matches
from fp4_inductor.passes.missed import UNCHAINED
from lowering_tests.fake_cuda import call_body, generated_code

BF16 = torch.bfloat16
K, HEADS, KV_HEADS, D, INNER, LENGTH, EPS = 1024, 8, 2, 128, 1536, 256, 1e-6
ON = dict(candidates=("cuda_gemv_chain",))


def normalized(x, weight):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class DecoderLayer(nn.Module):
    """A layer of a Llama over a cache."""

    def __init__(self):
        super().__init__()
        options = dict(bias=False, dtype=BF16, device="cuda")
        for name in ("first", "second"):
            self.register_buffer(name, torch.ones(K, dtype=BF16, device="cuda"))
        self.q, self.k, self.v = (FP4Linear(K, n * D, **options) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.down = FP4Linear(HEADS * D, K, **options), FP4Linear(INNER, K, **options)
        self.gate, self.up = (FP4Linear(K, INNER, **options) for _ in range(2))
        with mock.patch.object(SiblingWeight, "refresh", lambda self: setattr(self, "shared", False)):  # values of fake tensors cannot be compared
            pack_siblings([self.q, self.k, self.v])
            pack_siblings([self.gate, self.up])

    def forward(self, x, keys, values, arrivals, position):
        h = normalized(x, self.first)
        q, k, v = (f(h).view(1, 1, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = torch.ops.fp4.cached_attention(q, k, v, keys, values, position, arrivals=arrivals)
        x = x + self.o(attended.reshape(1, 1, -1))
        h = normalized(x, self.second)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64, device="cuda"))

    def forward(self, x, cache, arrivals):
        arrivals = arrivals * 2
        for i, layer in enumerate(self.layers):
            x = layer(x, cache * (2 * i + 2), cache * (2 * i + 3), arrivals, self.position)
        return x


def compiled(build=Decoder, rows=1, **options):
    """``(the wrapper's call, journal, matches, why products were left apart)``"""
    reset_matches()
    with listen() as entries, missed.listen() as left, dispatch(**ON | options):
        code = generated_code(build, [((1, rows, K), BF16), ((1, KV_HEADS, LENGTH, D), BF16), ((8,), torch.int32)], csrc="")[0]
    return call_body(code), entries, matches(), [m.reason for m in left if m.what == UNCHAINED]


def test_two_layers():
    body, entries, counted, left = compiled()
    print(body)
    for e in entries:
        print(e.op, e.n, e.k, e.note, e.module, e.decision.row.kernel)
    print(counted, left)
    assert 0
