"""Norm and rotation in front of fp4.cached_attention become its prologue, in every form that models write; what is another computation does not.

Which calls one launch serves is decided on a GPU; here the pass is told that it serves all.
"""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.passes import missed, rope_attention

B, H, KV, S = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(rope_attention, "serves", lambda node: True)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def hugging_face(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_half(x) * sin


def partial(x, cos, sin):
    r = cos.shape[-1]
    return torch.cat([hugging_face(x[..., :r], cos, sin), x[..., r:]], -1)


def by_halves(x, cos, sin):
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def interleaved(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(1) for t in (cos, sin))
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def backwards(x, cos, sin):
    """The other direction: the first half is negated."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([second, -first], -1) * sin.unsqueeze(1)


def rms(x, weight, eps=1e-6):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma(x, weight, eps=1e-6):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


def centred(x, weight, eps=1e-6):
    y = x.float()
    return weight * ((y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self, rope=hugging_face, norm=None, key_norm="as query", d=16, rotary=16, early_norm=True, key_rope=None, dtype=torch.float32):
        super().__init__()
        self.rope, self.norm, self.key_norm, self.early_norm = rope, norm, norm if key_norm == "as query" else key_norm, early_norm
        self.key_rope = key_rope or rope
        self.d, self.dtype = d, dtype
        torch.manual_seed(0)
        self.proj = torch.nn.Linear(32, (H + 2 * KV) * d, bias=False, dtype=dtype)
        self.weights = torch.nn.Parameter(torch.rand(2, d, dtype=dtype) + 0.5)
        self.register_buffer("angles", torch.rand(B, 3, rotary // 2, dtype=torch.float32) * 6)

    def cache(self):
        return torch.zeros(2, B, KV, S, self.d, dtype=self.dtype), torch.zeros(B * KV, dtype=torch.int32)

    def prepared(self, x, norm, weight, rope, cos, sin):
        if norm and self.early_norm:
            x = norm(x, weight)
        x = x.transpose(1, 2)
        if norm and not self.early_norm:
            x = norm(x, weight)
        return rope(x, cos, sin) if rope else x

    def forward(self, x, caches, arrivals, position):
        q, k, v = self.proj(x).split([H * self.d, KV * self.d, KV * self.d], -1)
        q, k, v = (t.view(B, x.shape[1], -1, self.d) for t in (q, k, v))
        angles = torch.cat([self.angles[:, : x.shape[1]]] * (1 if self.rope is by_halves else 2), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q = self.prepared(q, self.norm, self.weights[0], self.rope, cos, sin)
        k = self.prepared(k, self.key_norm, self.weights[1], self.key_rope, cos, sin)
        out = self.attend(q, k, v.transpose(1, 2), caches, arrivals, position)
        return out.flatten(2)

    def attend(self, q, k, v, caches, arrivals, position):
        return torch.ops.fp4.cached_attention(q, k, v, caches[0], caches[1], position, arrivals=arrivals)


@pytest.fixture
def compared(compiled):
    """``compared(layer)``: how often the pass rewrote, and why not; the result and the caches are those of eager code."""

    @torch.no_grad()
    def run(layer, queries=1):
        x, position = torch.randn(B, queries, 32, dtype=layer.dtype), torch.tensor(5)
        theirs, ours = layer.cache(), layer.cache()
        want = layer(x, *theirs, position)
        with missed.listen() as left:
            c = compiled(layer, x, *ours, position)
        bound = 2e-6 if layer.dtype == torch.float32 else 2e-2
        for a, b in ((c.result, want), (ours[0], theirs[0])):
            assert float((a.double() - b.double()).norm()) <= bound * float(b.double().norm())
        return c.matches.get("rope_attention", 0), [m.reason for m in left]

    return run


FORMS = {
    "Llama": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "Qwen 3": dict(norm=rms),
    "Qwen 3 in bfloat16": dict(norm=rms, dtype=torch.bfloat16),
    "Gemma 3": dict(norm=gemma, early_norm=False),
    "Gemma 3 in bfloat16": dict(norm=gemma, early_norm=False, dtype=torch.bfloat16),
    "partial": dict(rope=partial, d=24),
    "partial, behind a norm": dict(rope=partial, d=24, norm=rms),
    "halves apart": dict(rope=by_halves),
    "halves apart in bfloat16": dict(rope=by_halves, dtype=torch.bfloat16),
    "a norm of the key alone": dict(norm=None, key_norm=rms),
    "a norm alone": dict(rope=None, norm=rms),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_becomes_a_prologue(compared, form):
    layer = Layer(**FORMS[form])
    assert compared(layer) == (1, [])
    assert compared(layer, queries=3)[1] == []


class Shared(Layer):
    """The rotated key is needed elsewhere."""

    def attend(self, q, k, v, *rest):
        return super().attend(q, k, v, *rest) + k.sum()


def twice(x, weight):
    return rms(x, weight, 2e-6)


APART = {
    "interleaved pairs": (dict(rope=interleaved), "no norm and no rotation of a known form in front of it"),
    "the other direction": (dict(rope=backwards), "no norm and no rotation of a known form in front of it"),
    "only the query": (dict(key_rope=interleaved), "only one of query and key is rotated in a form that is known"),
    "eps": (dict(norm=rms, key_norm=twice), "the norms of query and key have different constants"),
}


@pytest.mark.parametrize("case", APART)
def test_what_is_another_computation_is_left_alone(compared, case):
    options, reason = APART[case]
    assert compared(Layer(**options)) == (0, [reason])


def test_a_key_that_another_operation_reads(compared):
    assert compared(Shared()) == (0, ["another operation reads the query or the key that is attended with"])


def test_another_norm_stays_in_front(compared):
    """The rotation is taken all the same."""
    assert compared(Layer(norm=centred)) == (1, [])


def test_the_reason_is_told():
    with missed.listen() as left:
        missed.missed(type("Node", (), {"name": "attention"}), torch.empty(1, 4, 1, 16), "because", missed.BEFORE_ATTENTION)
    assert str(left[0]) == "attention [1, 4, 1, 16] is normed and rotated before fp4.cached_attention: because"
