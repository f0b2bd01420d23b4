"""A decode step of attention over a cache in the code that Inductor generates for a GPU: between the product of q, k and v and the attention lies nothing.

The stand-in for a GPU traces no call that writes its inputs, so the cache is made in the graph here; that no cache is copied is tested on a CPU
(integrations/test_cache.py).
"""

from __future__ import annotations

import re

import pytest
import torch

import fp4_inductor
from fp4_inductor.lowerings import cached_attention as lowering
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.fake_cuda import call_body, generated_code

BF16 = torch.bfloat16
H, KV, D, S, K = 32, 8, 128, 520, 512
ENDS = (H * D, (H + KV) * D, (H + 2 * KV) * D)


class Attention(torch.nn.Module):
    """As Qwen 3 writes it; ``queries`` new tokens of ``batch`` sequences."""

    def __init__(self):
        super().__init__()
        made = dict(dtype=BF16, device="cuda")
        self.w, self.g = torch.empty(ENDS[2], K // 2, dtype=torch.uint8, device="cuda"), torch.empty(3, device="cuda")
        self.s = torch.empty(ENDS[2], K // 16, dtype=torch.float8_e4m3fn, device="cuda")
        self.q_norm, self.k_norm = torch.empty(D, **made), torch.empty(D, **made)
        self.position, self.turns = torch.empty((), dtype=torch.int64, device="cuda"), torch.empty(D // 2, device="cuda")

    def norm(self, x, weight):
        y = x.float()
        return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x, keys, values, arrivals):
        spans = [0, ENDS[0], ENDS[0], ENDS[1], ENDS[1], ENDS[2]]
        parts = torch.ops.fp4.linear_siblings(x.relu(), self.w, self.s, self.g, None, spans, "auto")
        q, k, v = (part.view(*x.shape[:2], -1, D) for part in parts)
        q, k = self.norm(q, self.q_norm).transpose(1, 2), self.norm(k, self.k_norm).transpose(1, 2)
        angles = (self.position.float() * self.turns).reshape(1, 1, -1).expand(1, x.shape[1], -1)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)
        q, k = (t * cos + torch.cat([-t.narrow(-1, D // 2, D // 2), t.narrow(-1, 0, D // 2)], -1) * sin for t in (q, k))
        cache = keys * 2, values * 3, arrivals * 2
        out = torch.ops.fp4.cached_attention(q, k, v.transpose(1, 2), *cache[:2], self.position, arrivals=cache[2])
        return out.flatten(2)


def body(queries=1, batch=1, cc=(9, 0)):
    reset_matches()
    cache = (batch, KV, S, D)
    shapes = [((batch, queries, K), BF16), (cache, BF16), (cache, BF16), ((batch * KV,), torch.int32)]
    with listen() as entries:
        code = generated_code(Attention, shapes, csrc="", cc=cc)[0]
    told = next(e for e in entries if e.op == "fp4.cached_attention")
    return call_body(code), told


@pytest.mark.parametrize(("queries", "batch", "cc"), [(1, 1, (9, 0)), (1, 8, (9, 0)), (4, 2, (9, 0)), (1, 1, (8, 0)), (1, 1, (12, 0))])
def test_query_key_and_value_are_read_where_their_product_lies(queries, batch, cc):
    code, told = body(queries, batch, cc)
    assert told.decision.row.kernel == ("cuda_step_attention" if queries == 1 and cc >= (9, 0) else "triton_cached_attention")
    assert matches()["rope_attention"] == 1
    (arguments,) = re.findall(r"fp4\.cached_attention\.default\((.*)\)", code)
    operands = re.findall(r"reinterpret_tensor\((\w+), \(\d+, (\d+), \d+, 128\), \([^)]*\), (\d+)\)", arguments)
    assert [(int(heads), int(begin)) for _, heads, begin in operands] == [(H, 0), (KV, ENDS[0]), (KV, ENDS[1])]
    assert len({name for name, _, _ in operands}) == 1, "one product"
    assert "1e-06, 0.0" in arguments and arguments.endswith("128")
    assert "mean" not in code and code.count("cos") == 1


def test_many_tokens_are_normed_and_rotated_before():
    """By Inductor's kernels: they are too many for one launch."""
    code, told = body(queries=5)
    assert told.decision.row.kernel == "triton_prefill_attention"
    assert "rope_attention" not in matches() and "mean" in code


def test_old_tokens_are_requested_early_where_that_is_proven(monkeypatch):
    asked = []
    monkeypatch.setattr(lowering, "why_not_early", lambda new, cache: asked.append((len(new), len(cache))) or "")
    early = re.compile(r"None, False, b\d+, (True|False), ")
    assert early.search(body()[0])[1] == "True" and asked == [(3, 3)]
    monkeypatch.setattr(lowering, "why_not_early", lambda new, cache: "not known")
    assert early.search(body()[0])[1] == "False"
    asked.clear()
    monkeypatch.setattr(lowering, "EARLY", 0)  # of fewer sequences than the call has
    assert early.search(body()[0])[1] == "False" and not asked


class Quantized(Attention):
    """Over a cache whose keys are int8 and whose values are NVFP4. The stand-in for a GPU traces no call that writes its inputs: all is made here."""

    def __init__(self):
        super().__init__()
        self.scales = torch.empty(1, KV, S, dtype=torch.float16, device="cuda")
        self.blocks = torch.empty(1, KV, S, D // 16, device="cuda")
        self.mean = torch.empty(1, KV, D, device="cuda")

    def forward(self, x, keys, values, arrivals):
        q, k, v = (part.view(1, 1, -1, D).transpose(1, 2) for part in x.split([H * D, KV * D, KV * D], 2))
        q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        stored = dict(key_scale=self.scales * 2, value_scale=self.scales * 3, value_blocks=(self.blocks * 2).to(torch.float8_e4m3fn), key_mean=self.mean * 2)
        return torch.ops.fp4.cached_attention(q, k, v, keys + 1, values + 1, self.position, arrivals=arrivals * 2, **stored).flatten(2)


@pytest.mark.parametrize(
    ("off", "kernel"),
    [
        ({}, "cuda_step_attention_codes"),
        ({"step_attention": 0}, "cuda_quantized_attention"),
        ({"step_attention": 0, "cuda_attention": 0}, "triton_quantized_attention"),
        ({"step_attention": 0, "cuda_attention": 0, "attention": 0}, "append + attention"),
    ],
)
def test_norms_move_into_the_one_launch_over_a_cache_in_8_or_4_bits(off, kernel):
    reset_matches()
    shapes = [((1, 1, ENDS[2]), BF16), ((1, KV, S, D), torch.int8), ((1, KV, S, D // 2), torch.uint8), ((KV,), torch.int32)]
    with fp4_inductor.dispatch(thresholds=off), listen() as entries:
        code = call_body(generated_code(Quantized, shapes, csrc="")[0])
    told = next(e for e in entries if e.op == "fp4.cached_attention")
    assert told.decision.row.kernel == kernel
    on = kernel != "append + attention"
    assert matches().get("rope_attention", 0) == on and ("mean" in code) != on
