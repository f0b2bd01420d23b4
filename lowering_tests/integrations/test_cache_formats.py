"""KVCache in 8 and 4 bits in Transformers models: tokens, graphs, memory, crop, beams, what is refused."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, errors
from fp4_inductor.decoding import regions
from fp4_inductor.formats import kv
from lowering_tests.integrations.test_cache import GREEDY, NEW, build, ours, prompt

FORMATS = tuple(kv.FORMATS)


def separate(name: str, first: int):
    """An attention of Transformers without a cache, over keys and values that it quantizes itself; the mean is that of the ``first`` tokens."""
    f = kv.FORMATS[name]

    def forward(module, query, key, value, attention_mask, scaling=None, **options):
        mean = key[:, :, :first].mean(2)
        key = kv.dequantize(kv.quantize(key, f.key, mean), f.key, mean)
        value = kv.dequantize(kv.quantize(value, f.value), f.value)
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        window = options.get("sliding_window")
        seen = seen if window is None else seen.triu(1 - window)
        weights = (query @ key.mT * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return forward


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral"])
@pytest.mark.parametrize("name", ["fp8", "k8v4"])
def test_greedy_tokens_are_those_of_attention_over_tensors_that_are_quantized_apart(name, family):
    """The text that ``generate`` wrote over the cache, given to a model whose attention quantizes by itself: each token is the one it would write."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, (ids, _) = build(family), prompt(2, 17)
    plain = model.generate(ids, **GREEDY)
    text = model.generate(ids, past_key_values=ours(model, 64, kv=name), **GREEDY)
    ALL_ATTENTION_FUNCTIONS.register("separate", separate(name, 17))
    model.set_attn_implementation("separate")
    logits = model(text[:, :-1], use_cache=False).logits[:, 16:]
    logits[..., 2] = float("-inf")  # min_new_tokens
    assert text.shape[1] == 17 + NEW and torch.equal(logits.argmax(-1), text[:, 17:])
    assert not torch.equal(text, plain), "rounding would not be seen"


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_for_each_token_is_one_call(name, family):
    """Windows, soft-caps and sinks too; ``"nvfp4"`` of texts that are longer than its exact tokens."""
    model, (ids, _) = build(family), prompt(2, 100)
    cache = ours(model, 128, kv=name)
    want = model(ids, past_key_values=cache).logits
    cache.reset()
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :85], *ids[:, 85:].split(1, 1))]
    other = torch.cat(parts, 1)
    # the mean of keys is that of the first call's tokens: the same 85 of 100 here
    assert float((other - want).norm() / want.norm()) < 0.2
    cache.reset()
    again = torch.cat([model(part, past_key_values=cache).logits for part in (ids[:, :85], ids[:, 85:93], ids[:, 93:])], 1)
    torch.testing.assert_close(again, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("fp8", marks=pytest.mark.slow), pytest.param("k8v4", marks=pytest.mark.slow)])
def test_compiled_steps_write_the_cache_where_it_lies(name):
    from torch._inductor.utils import run_and_get_code

    model, (ids, padded) = build("llama"), prompt()
    cache = ours(model, 48, kv=name)
    want = model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY)
    cache.reset()
    model.forward = torch.compile(model.forward, fullgraph=True)
    got, codes = run_and_get_code(lambda: model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY))
    assert torch.equal(got, want) and len(codes) == 2
    for code in codes:
        calls = [line for line in code.splitlines() if "= torch.ops.fp4.cached_attention.default(" in line]
        assert len(calls) == 2
        shapes = {tuple(t.shape) for t in cache.layers[0].tensors if t.dim() > 3}
        assert not [line for line in code.splitlines() for s in shapes if f"empty_strided_cpu(({', '.join(map(str, s))})" in line], "a copy of a cache"


@pytest.mark.parametrize("name", FORMATS)
def test_speculation_and_beams(name):
    """Prompt lookup takes tokens back, and beams reorder all parts of the cache."""
    model, (ids, _) = build("mistral"), prompt()
    repeating = ids[:1].repeat(1, 15)  # 135 tokens: the mean of keys is that of 128, whatever prompt lookup adds to the first call
    cache = ours(model, 192, 1, rollback=4, kv=name)
    alone = model.generate(repeating, past_key_values=cache, **GREEDY)
    cache.reset()
    assert torch.equal(model.generate(repeating, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY), alone)
    beams = ours(model, 64, 4, kv=name)
    with torch.no_grad():
        model(torch.cat([ids, ids.flip(1)]), past_key_values=beams)
    order = torch.tensor([2, 2, 0, 1])
    before = [t.clone() for layer in beams.layers for t in layer.tensors]
    beams.reorder_cache(order)
    after = [t for layer in beams.layers for t in layer.tensors]
    assert len(after) == 2 * {"fp8": 5, "k8v4": 6, "nvfp4": 9}[name]
    assert all(torch.equal(a.float(), b.float()[order]) and a.float().any() for a, b in zip(after, before, strict=True))


@torch.no_grad()
def test_crop_among_exact_tokens():
    """Of 100 tokens, a ring of 64 + 4 exact ones has the last 68: what a query at position 95 needs, not what one at 94 does."""
    model, (ids, _) = build("llama"), prompt(1, 120)
    cache = ours(model, 128, 1, rollback=4, kv="nvfp4")
    want = model(ids[:, :101], past_key_values=cache).logits
    cache.reset()
    model(ids[:, :95], past_key_values=cache)
    straight = model(ids[:, 95:101], past_key_values=cache).logits
    cache.reset()
    model(ids[:, :95], past_key_values=cache)
    model(torch.full_like(ids[:, :5], 5), past_key_values=cache)
    with pytest.raises(errors.UnsupportedOpError, match=r"back to 94 tokens.*last 64 tokens exact.*holds 68, of 100.*rollback=4"):
        cache.crop(-6)
    cache.crop(-5)
    torch.testing.assert_close(model(ids[:, 95:101], past_key_values=cache).logits, straight, rtol=1e-4, atol=1e-4)
    cache.crop(-101)
    assert torch.equal(model(ids[:, :101], past_key_values=cache).logits, want)
    for other in ("fp8", "k8v4"):  # which have no such tokens
        free = ours(model, 128, 1, kv=other)
        model(ids, past_key_values=free)
        free.crop(-90)
        assert int(free.get_seq_length()) == 30


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "backend"),
    [("nvfp4", "inductor"), *(pytest.param(name, backend, marks=pytest.mark.slow) for name in ("fp8", "k8v4") for backend in ("aot_eager", "inductor"))],
)
def test_a_quantized_model_of_many_layers_is_compiled(name, backend):
    """Its layers are calls of one region, in which torch takes no None for an argument that the op writes."""
    model, (ids, padded) = build("llama", num_hidden_layers=4), prompt()
    fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    assert all("forward" in layer.__dict__ for layer in regions.decoder_layers(model))
    cache = ours(model, 64, kv=name)
    want = model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY)
    cache.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    assert torch.equal(model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY), want)


def test_what_it_says_and_takes():
    model = build("llama", head_dim=128)
    dense = 4 * 2 * 2 * 2 * 2 * 512 * 128  # float32; layers, batch, heads, K and V, tokens
    mean = 2 * 2 * 2 * 128 * 4
    for name, bits in (("fp8", 16.25), ("k8v4", 12.75), ("nvfp4", 9.25)):
        cache = KVCache(model, 512, 2, kv=name)
        exact = 2 * 2 * 2 * 2 * (4 + 64 + 128) * 128 * 4 if name == "nvfp4" else 0
        assert cache.nbytes == dense // 4 * bits / 16 + mean + exact
        assert repr(cache).startswith(f"KVCache({name} of float32, batch 2, max_length 512, layers: 2 full;")
        assert cache.nbytes == sum(t.nbytes for layer in cache.layers for t in layer.tensors)
    assert KVCache(model, 512, 2).nbytes == KVCache(model, 512, 2, kv="bf16").nbytes == dense


def test_explain_tells_the_format_where_a_kernel_could_not_read_it():
    model = build("llama")
    cache = ours(model, 48, kv="k8v4")
    found = fp4_inductor.explain(model, input_ids=torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
    assert [row.kernel for row in found.rows if row.op == "fp4.cached_attention"] == ["append + attention"] * 2


def test_refusals():
    model = build("llama")
    with pytest.raises(errors.ConfigError, match=r"'int4'.*bf16.*fp8.*k8v4.*nvfp4"):
        KVCache(model, 16, kv="int4")
    with pytest.raises(errors.ShapeError, match=r"24.*multiples of 16"):
        KVCache(build("llama", head_dim=24), 16, kv="k8v4")
    fresh = build("llama", "sdpa", head_dim=24)
    with pytest.raises(errors.ShapeError):
        KVCache(fresh, 16, kv="fp8")
    assert fresh.config._attn_implementation == "sdpa", "nothing was changed"
    cache, (ids, _) = ours(model, 16, kv="k8v4"), prompt()
    for wrong, error in ((model.bfloat16(), errors.DTypeError), (build("llama", "fp4_inductor", num_key_value_heads=4), errors.ShapeError)):
        with torch.no_grad(), pytest.raises(error):
            wrong(ids, past_key_values=cache)
    assert not any(t.float().any() for layer in cache.layers for t in layer.tensors)
