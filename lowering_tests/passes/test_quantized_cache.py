"""Attention over a cache in 8 bits that the graph dequantizes becomes fp4.decode_attention over the codes: which forms, the graph, the numbers, and what not.

Which calls the kernel serves is decided on a GPU; here the pass is told that it serves all, but where that is what is tested.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fp4_inductor.lowerings.journal import listen
from fp4_inductor.passes import missed, quantized_cache
from lowering_tests.fake_cuda import call_body, generated_code

B, H, KV, S, D = 2, 8, 2, 96, 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(quantized_cache, "why_not", lambda attention, kv_heads: "")


def repeat_kv(x, n=H // KV):
    """Of Transformers."""
    b, h, s, d = x.shape
    return x.unsqueeze(2).expand(b, h, n, s, d).reshape(b, h * n, s, d)


def interleaved(x):
    """Of gpt-fast and torchao."""
    return x.repeat_interleave(H // KV, 1)


def cast(codes, scale, dtype):
    return codes.to(dtype) * scale


def promoted(codes, scale, dtype):
    """torchao's ``k_cache * k_cache_scale``."""
    return codes * scale


def in_float32(codes, scale, dtype):
    return (codes.float() * scale.float()).to(dtype)


def of_compressed_tensors(strategy):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=8, strategy=strategy)
    return lambda codes, scale, dtype: dequantize(codes, scale, args=args)


class Attend:
    """A decode step: the codes are arguments, as the buffers of a cache are."""

    def __init__(self, dequantize=cast, repeat=repeat_kv, codes=torch.int8, scale=(B, KV, S, 1), dtype=BF16, queries=1, mask="bool", gqa=False, turned=False):
        self.dequantize, self.repeat, self.gqa, self.turned, self.dtype = dequantize, (lambda x: x) if gqa else repeat, gqa, turned, dtype
        torch.manual_seed(0)
        shape = (B, S, KV, D) if turned else (B, KV, S, D)
        self.codes = [(40 * torch.randn(shape)).clamp(-127, 127).to(codes) for _ in range(2)]
        self.scales = [None if scale is None else (torch.rand(scale) / 30 + 0.01).to(dtype) for _ in range(2)]
        self.query = torch.randn(B, H, queries, D).to(dtype)
        seen = torch.arange(S) <= torch.arange(S // 2, S // 2 + queries)[:, None]
        self.mask = {"bool": seen[None, None].expand(B, 1, queries, S), "two": seen, "none": None, "added": torch.zeros(1, 1, queries, S).to(dtype)}[mask]

    @property
    def arguments(self):
        return self.query, *self.codes, *self.scales, self.mask

    def dense(self, codes, scale):
        x = self.dequantize(codes, scale, self.dtype)
        return self.repeat(x.transpose(1, 2) if self.turned else x)

    def __call__(self, query, key, value, key_scale, value_scale, mask):
        key, value = self.dense(key, key_scale), self.dense(value, value_scale)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.gqa)


def _double(mask):
    return mask if mask is None or mask.dtype == torch.bool else mask.double()


def check(compiled, attend):
    c = compiled(attend.__call__, *attend.arguments)
    assert c.matches == {"quantized_cache": 1}
    assert "scaled_dot_product" not in c.graph and c.graph.count("fp4.decode_attention") == 1
    assert not any(op in c.graph for op in ("mul", "convert_element_type", "clone")) or attend.mask is not None
    wide = [None if t is None else t.double() for t in (attend.query, *attend.scales)]
    attend.dtype = torch.float64
    key, value = (attend.dense(codes, scale) for codes, scale in zip(attend.codes, wide[1:], strict=True))
    want = F.scaled_dot_product_attention(wide[0], key, value, attn_mask=_double(attend.mask), enable_gqa=attend.gqa)
    bound = {BF16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[c.result.dtype]
    assert c.result.shape == attend.query.shape and c.result.dtype == attend.query.dtype
    assert float((c.result.double() - want).norm() / want.norm()) <= bound
    return c


FORMS = {
    "Transformers' repeat": {},
    "gpt-fast's repeat": dict(repeat=interleaved),
    "torchao": dict(dequantize=promoted, repeat=interleaved),
    "in float32": dict(dequantize=in_float32),
    "compressed-tensors, INT8": dict(dequantize=of_compressed_tensors("tensor"), scale=(1,)),
    "compressed-tensors, FP8": dict(dequantize=of_compressed_tensors("tensor"), codes=FP8, scale=(1,)),
    "FP8, one scale": dict(codes=FP8, scale=()),
    "FP8, a scale a head": dict(codes=FP8, scale=(KV, 1, 1)),
    "FP8 without a scale": dict(codes=FP8, scale=None, dequantize=lambda codes, scale, dtype: codes.to(dtype)),
    "a number": dict(scale=None, dequantize=lambda codes, scale, dtype: codes.to(dtype) * 0.03125),
    "a scale a token": dict(scale=(B, 1, S, 1)),
    "grouped heads of torch": dict(gqa=True),
    "tokens before heads": dict(turned=True, scale=(B, S, KV, 1)),
    "three dimensions": dict(scale=(B, KV, S), dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale[..., None]),
    "several queries": dict(queries=3),
    "a mask of two dimensions": dict(queries=2, mask="two"),
    "no mask": dict(mask="none"),
    "a mask that adds": dict(mask="added"),
    "float16": dict(dtype=torch.float16),
    "float32": dict(dtype=torch.float32),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(compiled, everywhere, form):
    check(compiled, Attend(**FORMS[form]))


def test_the_graph(compiled, everywhere):
    c = check(compiled, Attend(scale=(B, KV, S), dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale[..., None], mask="none"))
    assert_expected_inline(
        c.graph,
        """\
v0 = aten.reshape.default(in1, [2, 2, 96, 1])
v1 = aten.reshape.default(in3, [2, 2, 96, 1])
v2 = fp4.decode_attention.default(in4, in0, in2, None, None, v0, v1)
v3 = aten.permute.default(v2, [0, 2, 1, 3])
return v3""",
    )
    turned = dict(codes=FP8, scale=(KV, S), turned=True, dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale.t()[None, :, :, None])
    c = check(compiled, Attend(**turned, mask="two", queries=2))
    assert_expected_inline(
        c.graph,
        """\
v0 = aten.full.default([], 0.0, dtype=torch.bfloat16, layout=torch.strided, pin_memory=False)
v1 = aten.full.default([], -inf, dtype=torch.bfloat16, layout=torch.strided, pin_memory=False)
v2 = aten.where.self(in5, v0, v1)
v3 = aten.permute.default(in0, [0, 2, 1, 3])
v4 = aten.permute.default(in2, [0, 2, 1, 3])
v5 = aten.reshape.default(in1, [1, 2, 96, 1])
v6 = aten.reshape.default(in3, [1, 2, 96, 1])
v7 = aten.reshape.default(v2, [1, 1, 2, 96])
v8 = fp4.decode_attention.default(in4, v3, v4, v7, None, v5, v6)
v9 = aten.permute.default(v8, [0, 2, 1, 3])
return v9""",
    )


def test_a_step_that_appends_first(compiled, everywhere):
    """The codes are what the cache holds after the new token was written, and the cache is written where it lies."""
    a = Attend()
    new, at = torch.full((B, KV, 1, D), 5, dtype=torch.int8), torch.tensor([3])

    def step(query, key, value, key_scale, value_scale, mask, new, at):
        key.index_copy_(2, at, new)
        return a(query, key, value, key_scale, value_scale, mask)

    theirs = [t.clone() for t in a.codes]
    want = step(a.query, *theirs, *a.scales, a.mask, new, at)
    c = compiled(step, *a.arguments, new, at)
    assert c.matches == {"quantized_cache": 1}
    assert torch.equal(a.codes[0], theirs[0]) and float((c.result - want).float().norm()) <= 1.2e-2 * float(want.float().norm())


# --- the operators of attention that CUDA has -------------------------------------------------------------------------

aten = torch.ops.aten
OPERATORS = {
    "flash": lambda q, k, v, mask: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=0.3),
    "efficient": lambda q, k, v, mask: aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, scale=0.3),
    "cudnn": lambda q, k, v, mask: aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, scale=0.3),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_of_attention(compiled, everywhere, name):
    """The bias is expanded to a row for each query and head, as torch does it, and passed as it was."""
    a = Attend(mask="added")
    added = torch.where(torch.arange(S) < 50, 0.0, float("-inf")).to(BF16)

    def attend(query, key, value, key_scale, value_scale, mask):
        bias = None if name == "flash" else mask[None, None, None].expand(B, H, 1, S)
        return OPERATORS[name](query, a.dense(key, key_scale), a.dense(value, value_scale), bias)[0]

    c = compiled(attend, *a.arguments[:5], added)
    assert c.matches == {"quantized_cache": 1} and "0.3" in c.graph and "expand" not in c.graph
    key, value = (a.dense(codes, scale) for codes, scale in zip(a.codes, a.scales, strict=True))
    want = F.scaled_dot_product_attention(a.query, key, value, attn_mask=None if name == "flash" else added[None], scale=0.3)
    assert float((c.result - want).float().norm() / want.float().norm()) <= 1.2e-2


SHAPES = [((1, 8, 1, 128), BF16), *[((1, 2, 256, 128), torch.int8)] * 2, *[((1, 2, 256, 1), BF16)] * 2, ((1, 1, 1, 256), BF16)]


def on_cuda(queries=1, cc=(8, 0)):
    """(generated code, journal, what was left) of a decode step on a GPU that is not there."""
    attend = Attend()

    class Step(torch.nn.Module):
        def forward(self, query, key, value, key_scale, value_scale, mask):
            key, value = attend.dense(key, key_scale), attend.dense(value, value_scale)
            return OPERATORS["efficient"](query, key, value, mask.expand(1, 8, queries, 256))[0] + 1

    shapes = [((1, 8, queries, 128), BF16), *SHAPES[1:]]
    with listen() as entries, missed.listen() as left:
        code = generated_code(Step, shapes, cc=cc)[0]
    return call_body(code), entries, [m.reason for m in left]


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)], ids=str)
def test_the_generated_code_reads_the_codes_where_they_lie(cc):
    code, entries, left = on_cuda(cc=cc)
    assert not left and [e.decision.row.kernel for e in entries] == ["triton_codes_attention"]
    assert_expected_inline(
        code,
        """\
    b0 = torch.ops.fp4.decode_attention.default(in0, in1, in2, in3, 0.3, in4, in5)
    b1 = reinterpret_tensor(b0, (1, 8, 1, 128), (1024, 128, 128, 1), 0); del b0
    triton_poi_fused_add_0.run(b1, 1024, stream=stream0)
return (b1, )""",
    )


def test_what_the_kernel_does_not_serve():
    code, entries, left = on_cuda(queries=5)
    assert left == ["20 queries of a KV head, more than 16"] and not entries and "fp4" not in code


def test_a_cpu_dequantizes(compiled):
    with missed.listen() as left:
        c = compiled((a := Attend()).__call__, *a.arguments)
    (reason,) = [m.reason for m in left]
    assert not c.matches and reason.startswith("triton_codes_attention: needs sm_") and reason.endswith("this is a CPU")
    assert str(left[0]).endswith(f"is keys that are dequantized before attention: {reason}")


# --- near misses ------------------------------------------------------------------------------------------------------


def newest_exact(codes, scale, dtype):
    """torchao's AffineQuantizedKVCache: the newest tokens as they are."""
    dense = codes * scale
    dense[:, :, torch.tensor([7])] = torch.ones(B, KV, 1, D, dtype=dtype)
    return dense


MISSES = {
    "newest tokens exact": (dict(dequantize=newest_exact), "tokens that are not in 8 bits are written into the dequantized cache (index_put"),
    "a scale a channel": (dict(scale=(KV, 1, D)), "a scale for each channel, or for groups of them"),
    "a zero point": (
        dict(dequantize=lambda codes, scale, dtype: (codes.to(dtype) - codes[:, :, :1, :1].amax().to(torch.int8).to(dtype)) * scale),
        "as a zero point",
    ),
    "a number is added": (dict(dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale + 1), "the numbers are not code times scale"),
    "the scale is squared": (dict(dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale * scale), "the numbers are not code times scale"),
    "a scale for two tokens": (
        dict(scale=(B, KV, S // 2, 1), dequantize=lambda codes, scale, dtype: codes.to(dtype) * scale.repeat_interleave(2, 2)),
        "a scale for each channel, or for",
    ),
    "heads in turn": (dict(repeat=lambda x: x.repeat(1, H // KV, 1, 1)), "aten.repeat.default between the codes and the attention"),
    "tokens backwards": (dict(repeat=lambda x: repeat_kv(x.flip(2))), "prims.rev.default between the codes and the attention"),
    "heads backwards": (dict(repeat=lambda x: repeat_kv(torch.cat([x[:, 1:], x[:, :1]], 1))), "are written into the dequantized cache (cat"),
    "heads and tokens exchanged": (dict(scale=(1,), repeat=lambda x: repeat_kv(x.reshape(B, S, KV, D).transpose(1, 2))), "in another order"),
}


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses(compiled, everywhere, miss):
    options, reason = MISSES[miss]
    a = Attend(**options)
    with missed.listen() as left:
        c = compiled(a.__call__, *a.arguments)
    assert not c.matches and len(left) == 1 and reason in left[0].reason, left
    want = a(*a.arguments)
    assert float((c.result - want).float().norm()) <= 2e-2 * float(want.float().norm())


def test_near_misses_of_the_attention(compiled, everywhere):
    def left(attend, *arguments, **options):
        with missed.listen() as found:
            compiled(attend, *arguments, **options)
        return [m.reason for m in found]

    a = Attend()
    dense = torch.randn(B, H, S, D).to(BF16)
    flash = aten._scaled_dot_product_flash_attention_for_cpu

    def only_keys(query, key, value, key_scale):
        return F.scaled_dot_product_attention(query, a.dense(key, key_scale), value)

    assert left(only_keys, a.query, a.codes[0], dense, a.scales[0]) == ["only one of keys and values is in 8 bits"]
    assert left(lambda *xs: a(*xs, None), *a.arguments[:5], dynamic=True) == ["sizes of the cache are not known while the graph is compiled"]

    def causal(query, *rest):
        key, value = a.dense(rest[0], rest[2]), a.dense(rest[1], rest[3])
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    assert left(causal, *a.arguments[:5])[0].startswith("is_causal=True compares positions from the first key on")

    def with_sums(query, *rest):
        return flash(query, a.dense(rest[0], rest[2]), a.dense(rest[1], rest[3]))

    assert left(with_sums, *a.arguments[:5]) == ["more than the result of the attention is read, as in training"]
    assert left(lambda q, k: F.scaled_dot_product_attention(q, k, k), a.query, dense) == [], "no codes, no news"
