"""fp4_inductor.KVCache in Transformers models: the tokens of Transformers' own caches, eager and compiled; crop, reset, speculation; what is refused."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, errors
from fp4_inductor.decoding import attention, handles
from fp4_inductor.decoding.attention import NAME
from fp4_inductor.passes import missed, rope_attention

BASE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MIXED = dict(head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)
# family -> (configuration, what differs from BASE, the attention that computes what the model means)
FAMILIES = {
    "llama": ("LlamaConfig", {}, "sdpa"),
    "qwen2": ("Qwen2Config", {}, "sdpa"),
    "qwen3": ("Qwen3Config", dict(head_dim=16), "sdpa"),
    "mistral": ("MistralConfig", dict(sliding_window=12), "sdpa"),
    "gemma2": ("Gemma2Config", dict(MIXED, tie_word_embeddings=False, attn_logit_softcapping=5.0), "eager"),  # "sdpa" leaves the soft-cap out
    "gemma3": ("Gemma3TextConfig", dict(MIXED, tie_word_embeddings=False), "sdpa"),
    "phi3": ("Phi3Config", {}, "sdpa"),
    "gpt_oss": ("GptOssConfig", dict(MIXED, **EXPERTS), "eager"),  # sinks
    "mixtral": ("MixtralConfig", EXPERTS, "sdpa"),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2), "sdpa"),
    "smollm": ("LlamaConfig", dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=144, tie_word_embeddings=True), "sdpa"),
}
NEW = 20
GREEDY = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)


def build(family: str, implementation: str | None = None, **changed):
    import transformers

    name, fields, meant = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | fields | changed)).eval()
    for p in model.parameters():  # as it is made, a tiny model says one token for ever
        p.data.mul_(8) if p.dim() > 1 else p.data.add_(torch.randn_like(p) * 0.3)
    attention.register()
    model.set_attn_implementation(implementation or meant)
    return model


def prompt(batch=2, length=9):
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (batch, length))
    padded = torch.ones_like(ids)
    padded[0, : length // 2] = 0
    return ids, padded


def ours(model, max_length=64, batch=2, **options):
    if model.config.get_text_config()._attn_implementation == "eager":
        model.set_attn_implementation(NAME)
    return KVCache(model, max_length, batch, **options)


def held(cache: KVCache) -> list[torch.Tensor]:
    return [t.clone() for layer in cache._ours for t in (layer.keys, layer.values)]


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    """Both of its caches, with a padded batch and without; then prompt lookup, which takes tokens back."""
    import transformers

    model, (ids, padded) = build(family), prompt()
    masks = (torch.ones_like(ids), padded)
    want = [model.generate(ids, attention_mask=mask, **GREEDY) for mask in masks]
    static = model.generate(ids, attention_mask=padded, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=64), **GREEDY)
    assert torch.equal(static, want[1])
    assert len(set(want[0].flatten().tolist())) > 8 and not torch.equal(*want)
    cache = ours(model, rollback=4)
    for mask, tokens in zip(masks, want, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), tokens)
        assert int(cache.get_seq_length()) == ids.shape[1] + NEW - 1
        cache.reset()
    cache = ours(model, batch=1, rollback=4)
    repeating = ids[:1].repeat(1, 2)
    alone = model.generate(repeating, past_key_values=cache, **GREEDY)
    cache.reset()
    looked_up = model.generate(repeating, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(looked_up, alone)


def test_assisted_generation_and_beam_search():
    model, (ids, _) = build("mistral"), prompt()
    assistant = build("llama", num_hidden_layers=1)
    want, beams = model.generate(ids[:1], **GREEDY), model.generate(ids, num_beams=3, **GREEDY)
    cropped = []

    class Watched(KVCache):
        def crop(self, tokens_to_remove):
            cropped.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Watched(model, 64)
    assert torch.equal(model.generate(ids[:1], past_key_values=cache, assistant_model=assistant, **GREEDY), want)
    assert min(cropped) < 0
    assert torch.equal(model.generate(ids, past_key_values=KVCache(model, 64, 6), num_beams=3, **GREEDY), beams)


def test_a_conversation_goes_on_in_one_cache():
    """The second call brings the whole text; what the cache holds of it is not computed again."""
    model, (ids, _) = build("gemma3"), prompt()
    first = model.generate(ids, **GREEDY)
    longer = torch.cat([first, ids.flip(1)], 1)
    want = model.generate(longer, **GREEDY)
    cache = ours(model, 80)
    model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(model.generate(longer, past_key_values=cache, **GREEDY), want)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, prefill_chunk_size=4, **GREEDY), first)


@torch.no_grad()
def test_masks_of_the_caller():
    """A 4-D mask says everything; it may look ahead, and add numbers."""
    model, (ids, _) = build("gemma3"), prompt(1)
    model.config._attn_implementation = "sdpa"
    allowed = torch.rand(1, 1, 9, 9) < 0.6
    allowed |= torch.eye(9, dtype=torch.bool)
    for mask in (allowed, torch.zeros(1, 1, 9, 9).masked_fill(~allowed, float("-inf"))):
        model.set_attn_implementation("sdpa")
        want = model(ids, attention_mask=mask, use_cache=False).logits
        got = model(ids, attention_mask=mask, past_key_values=ours(model, 64, 1)).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_a_model_adds_to_causality_is_masked_in_full():
    """Gemma 3 lets the tokens of an image see each other: functions that Transformers' masks are made of."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    model, (ids, _) = build("gemma3"), prompt(1)
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]])
    empty = dict(config=model.config, inputs_embeds=torch.empty(1, 9, 0), attention_mask=torch.ones(1, 9), block_sequence_ids=blocks)

    def logits(cache):
        makers = dict(full_attention=create_causal_mask, sliding_attention=create_sliding_window_causal_mask)
        masks = {kind: make(**empty, past_key_values=cache, position_ids=None) for kind, make in makers.items()}
        return model(ids, attention_mask=masks, past_key_values=cache).logits, masks

    want, _ = logits(None)
    plain = model(ids).logits
    got, masks = logits(ours(model, 64, 1))
    assert masks["full_attention"].shape == (1, 1, 9, 64)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, plain, atol=1e-3)


def test_a_quantized_model():
    """Four layers: nested regions, where a static cache has them."""
    model, (ids, padded) = build("llama", num_hidden_layers=4), prompt()
    fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    want = model.generate(ids, attention_mask=padded, **GREEDY)
    cache = KVCache(model, 64, 2)
    assert cache.notes == []  # quantize_model has selected the attention
    assert torch.equal(model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY), want)
    cache.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(ids, attention_mask=padded, past_key_values=cache, **GREEDY), want)


# --- graphs -------------------------------------------------------------------------------------------------------


def cache_copies(code: str, shape: tuple[int, ...]) -> list[str]:
    """Lines of generated code that make memory of the shape of a cache."""
    return [line for line in code.splitlines() if f"empty_strided_cpu(({', '.join(map(str, shape))})" in line]


@pytest.mark.parametrize(("family", "backend"), [("llama", "inductor"), ("mistral", "aot_eager"), ("gemma3", "aot_eager")])
def test_two_graphs_that_write_the_cache_where_it_lies(family, backend):
    """One for the prompt, one for all steps, without graph breaks; one counter is advanced once; no copy of a cache, no mask."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._inductor.utils import run_and_get_code

    model, (ids, _) = build(family), prompt()
    want = model.generate(ids, **GREEDY)
    cache = ours(model, 48)
    counted = CompileCounterWithBackend(backend)
    model.forward = torch.compile(model.forward, backend=counted, fullgraph=True)
    got, codes = run_and_get_code(lambda: model.generate(ids, past_key_values=cache, **GREEDY))
    assert torch.equal(got, want)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), want)
    assert counted.frame_count == 2
    for graph in counted.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        assert sum("cached_attention" in name for name in called) == 2
        assert called.count("add_") == 1
        examples = [node.meta.get("example_value") for node in graph.graph.nodes]
        assert not any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in examples), "a mask"
    assert len(codes) == (2 if backend == "inductor" else 0)
    for code in codes:
        lines = [line for line in code.splitlines() if re.match(r"\s*buf\d+ = torch.ops.fp4.cached_attention.default\(", line)]
        assert len(lines) == 2
        # keys, values and position are inputs of the graph, and no mask follows them
        assert all(re.search(r"(, arg\d+_1){3}, None", line) for line in lines), lines
        assert not cache_copies(code, tuple(cache.layers[0].keys.shape))


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
def test_layers_that_are_alike_are_compiled_once(backend):
    model = fp4_inductor.quantize_model(build("qwen3", num_hidden_layers=6), NVFP4Config("amax"), progress=False)
    ids, _ = prompt(1)
    with torch.inference_mode():
        cache, plain = ours(model, batch=1), ours(model, batch=1)
        run = torch.compile(lambda ids: model(ids, past_key_values=cache).logits, fullgraph=True, backend=backend)
        model(ids, past_key_values=cache)
        _, codes = run_and_get_code(run, ids[:, :1])
        got = torch.cat([run(ids[:, i : i + 1]) for i in range(1, 5)], 1)
        model(ids, past_key_values=plain)
        model(ids[:, :1], past_key_values=plain)
        wanted = torch.cat([model(ids[:, i : i + 1], past_key_values=plain).logits for i in range(1, 5)], 1)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for a, b in zip(held(cache), held(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for code in codes:
        assert code.count("cached_attention.default(") == 2, "the last layer counts besides"
        assert not cache_copies(code, tuple(cache.layers[0].keys.shape)) and "ops.fp4.cached_attention_functional" not in code
    assert len(codes) == (backend == "inductor")


def test_a_copy_of_a_cache_would_be_seen():
    """The control: a graph that needs what the cache held before must copy it."""
    from torch._inductor.utils import run_and_get_code

    def step(q, k, v, keys, values, position):
        before = keys * 1.0
        out = torch.ops.fp4.cached_attention(q, k, v, keys, values, position)
        return out, before + keys

    shapes = ((1, 4, 1, 16), (1, 2, 1, 16), (1, 2, 1, 16), (1, 2, 24, 16), (1, 2, 24, 16))
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *(torch.randn(s) for s in shapes), torch.tensor(3))
    assert cache_copies(code, (1, 2, 24, 16))


def test_a_compiled_prompt_is_told_that_the_cache_is_empty():
    model = build("llama")
    ids, _ = prompt()
    cache, told, sdpa = ours(model), [], torch.nn.functional.scaled_dot_product_attention

    def look(graph, inputs):
        calls = graph.graph.find_nodes(op="call_function", target=torch.ops.fp4.cached_attention)
        told.append(([call.args[12] for call in calls], len(graph.graph.find_nodes(op="call_function", target=sdpa))))  # ``empty``
        return graph

    run = torch.compile(lambda ids: model(ids, past_key_values=cache).logits, backend=look, fullgraph=True)
    with torch.inference_mode():
        with cache.from_empty():
            run(ids)
        wanted = run(ids)
        with pytest.raises(errors.ConfigError, match="18 tokens"), cache.from_empty():
            pass
        cache.reset()
        model(ids, past_key_values=cache)
        assert torch.equal(model(ids, past_key_values=cache).logits, wanted)
    assert told == [([], 2), ([False, False], 0)]


def test_a_padded_batch_in_one_graph():
    """The mask is over positions, made outside of the graph, and has the shape of the longest sequence."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, (ids, padded) = build("mistral"), prompt()
    want = model.generate(ids, attention_mask=padded, **GREEDY)
    counted = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counted, fullgraph=True)
    assert torch.equal(model.generate(ids, attention_mask=padded, past_key_values=ours(model, 48), **GREEDY), want)
    assert counted.frame_count == 2


def test_explain_tells_the_kernel():
    model = build("llama")
    cache = ours(model, 48)
    with torch.no_grad():
        model(prompt()[0], past_key_values=cache)
        for called in (model, torch.compile(model, fullgraph=True)):
            found = fp4_inductor.explain(called, input_ids=torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
            rows = [row for row in found.rows if row.op == "fp4.cached_attention"]
            assert [(row.kernel, row.m, row.n, row.k) for row in rows] == [("append + attention", "2", 4, 16)] * 2
            assert [row.module.rsplit(".", 2)[-2:] for row in rows] == [["0", "self_attn"], ["1", "self_attn"]]


# Gemma 3 has norms of query and key and windows, Phi 3 one product for all three, gpt-oss sinks.
STEPS = ["gemma3", "gpt_oss", *(pytest.param(family, marks=pytest.mark.slow) for family in ("phi3", "llama", "qwen3", "mistral"))]


@torch.no_grad()
@pytest.mark.parametrize("family", STEPS)
def test_a_compiled_step_is_one_attention_between_two_products(family, monkeypatch):
    """As on a GPU that serves it in one launch: norm and rotation of query and key are in the call. Tokens are those of Transformers' own cache.

    In the generated code angles are computed once, nothing of query, key, value or a cache is copied, and there is one counter.
    """
    monkeypatch.setattr(rope_attention, "serves", lambda node: True)
    model, (ids, _) = build(family), prompt()
    want = model.generate(ids, **GREEDY)
    cache = ours(model)

    def greedy(output):
        output.logits[..., 2] = float("-inf")  # min_new_tokens
        return output.logits[:, -1:].argmax(-1)

    token = greedy(model(ids, past_key_values=cache))
    tokens, step, code = [ids, token], torch.compile(model, fullgraph=True), ""
    with missed.listen() as left:
        for _ in range(NEW - 1):
            if not code:
                (output, (code, *_)) = run_and_get_code(step, token, past_key_values=cache)
            else:
                output = step(token, past_key_values=cache)
            tokens.append(token := greedy(output))
    assert torch.equal(torch.cat(tokens, 1), want)
    assert not left, [str(m) for m in left]
    body = code[code.index("def call(") :]
    calls = re.findall(r"fp4\.cached_attention\.default\((.*)\)", body)
    assert len(calls) == 2
    for call in calls:
        operands = re.findall(r"reinterpret_tensor\((\w+), \(2, [42], 1, 16\), \((\d+), 16, ", call)
        assert len(operands) == 3, "query, key and value are views of products"
        products = {name for name, _ in operands}
        assert all(re.search(rf"extern_kernels\.(add)?mm\(.*out={name}\)", body) for name in products), products
    angles = [set(re.findall(r"buf\d+", call.rpartition("None, False, ")[2])[-2:]) for call in calls]
    if family != "gemma3":  # whose two kinds of layers turn by angles of their own
        assert angles[0] == angles[1] and len(angles[0]) == 2
    pointwise = re.findall(r"^ +(cpp_fused_\w+)\(", body, re.M)
    assert sum("cos" in name and "sin" in name for name in pointwise) <= (2 if family == "gemma3" else 1)
    assert sum("copy_" in name.replace("to_copy", "") for name in pointwise) == 1, "the counter"
    assert "index_copy" not in body and not any("clone" in name for name in pointwise)


# --- what a cache says and does --------------------------------------------------------------------------------------


def test_what_it_says():
    cache = KVCache(build("gemma3"), 64, 2, rollback=4)
    assert repr(cache) == "KVCache(float32, batch 2, max_length 64, layers: 1 ring of 16 (window 12), 1 full; 0.0 MiB)"
    assert cache.nbytes == 2 * (64 + 16) * 2 * 2 * 16 * 4
    assert cache.notes == ['attention: "fp4_inductor" in the place of "sdpa"']
    assert (cache.max_length, cache.get_max_length(), cache.batch_size, len(cache)) == (64, 64, 2, 2)
    assert cache.is_compileable and cache.is_croppable and cache.is_initialized
    assert cache.is_sliding == [True, False]
    assert KVCache(build("mistral"), 10).layers[0].window is None, "a window that is never left"


def test_memory_goes_with_the_cache():
    """No cycle holds it until a collection."""
    cache = KVCache(build("llama"), 64)
    seen = weakref.ref(cache.layers[0].keys)
    del cache
    assert seen() is None


@torch.no_grad()
def test_crop():
    model, (ids, _) = build("gemma3"), prompt(1, 30)
    cache = ours(model, 64, 1, rollback=4)
    want = model(ids).logits
    model(ids[:, :26], past_key_values=cache)
    cache.crop(0)
    assert int(cache.get_seq_length()) == 26
    cache.crop(-3)
    assert int(cache.get_seq_length()) == 23
    torch.testing.assert_close(model(ids[:, 23:24], past_key_values=cache).logits, want[:, 23:24], rtol=1e-4, atol=1e-4)
    # Of the 26 tokens that were there, the ring of 12 + 4 has the last 16: enough for position 21, not for 20.
    with pytest.raises(errors.UnsupportedOpError, match=r"back to 20 tokens.*holds 16 tokens, of 26.*rollback=4"):
        cache.crop(-4)
    assert int(cache.get_seq_length()) == 24
    cache.crop(-3)
    torch.testing.assert_close(model(ids[:, 21:25], past_key_values=cache).logits, want[:, 21:25], rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.ConfigError, match=r"beyond its start.*-26.*-25 to 0"):
        cache.crop(-26)
    with pytest.raises(errors.ConfigError, match="negative"):
        cache.crop(5)
    cache.crop(-25)
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, want, rtol=1e-4, atol=1e-4)


def test_an_interrupted_generate_leaves_a_cache_to_reset():
    model, (ids, _) = build("gemma3"), prompt()
    want = model.generate(ids, **GREEDY)
    cache, calls = ours(model, 64), []

    def interrupt(module, args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, **GREEDY)
    hook.remove()
    assert int(cache.get_seq_length()) == ids.shape[1] + 3
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), want)


def test_which_masks_are_made():
    """On a GPU the 2-D mask of one token is not looked at: it continues that of the prompt."""
    ones = torch.ones(2, 9, dtype=torch.bool)
    holes = ones.clone()
    holes[0, 0] = False
    counter = handles.Counter(torch.device("cpu"), 16, 2, 4)

    def mask(padding, queries, **more):
        arguments = dict(batch_size=2, q_length=queries, kv_length=16, attention_mask=padding, allow_is_causal_skip=queries > 1)
        return handles.mask_for(handles.Offset(counter), arguments | more, lambda **given: given)

    assert mask(None, 9) is None and mask(ones, 9) is None and mask(ones, 1) is None
    assert mask(holes, 9).shape == (2, 1, 1, 16) and mask(holes, 9).sum() == 17
    on_gpu = torch.ones(2, 10, dtype=torch.bool, device="meta")
    assert mask(on_gpu, 1).shape == (2, 1, 1, 16)
    mask(ones, 9)
    assert mask(on_gpu, 1) is None
    counter.reset()
    assert mask(on_gpu, 1).shape == (2, 1, 1, 16), "nobody has looked"
    for more in (dict(use_vmap=True), dict(allow_is_causal_skip=False)):
        whole = mask(ones, 9, **more)
        assert whole["q_offset"] is counter.position and whole["kv_length"] == 16 and whole["allow_is_causal_skip"] is False
    assert torch.equal(torch.arange(3) + handles.Offset(counter), torch.arange(3))


# --- layers of other kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), [("qwen3_next", "linear_attention"), ("llama4", "chunked_attention")])
@torch.no_grad()
def test_layers_that_are_not_served_are_transformers_own(tiny, family, kind):
    model, ids = tiny(family), torch.arange(3, 33).view(2, 15)
    if family == "llama4":
        model.config.attention_chunk_size, model.config.layer_types = 8, ["chunked_attention", "full_attention"]
    attention.use_attention_backend(model)
    cache = KVCache(model, 64, 2)
    assert [type(layer).__name__ == "KVLayer" for layer in cache.layers] == [False, True]
    assert [note.split(":")[0] for note in cache.notes] == [f"1 layers of {kind}"]
    assert "Transformers' own" in cache.notes[0]
    want = model(ids, use_cache=False).logits
    for _ in range(2):
        got = [model(ids[:, :9], past_key_values=cache).logits, *(model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9, 15))]
        torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-3, atol=1e-4)
        cache.reset()
    model(ids, past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(errors.UnsupportedOpError, match="layers that cannot"):
        cache.crop(-1)
    assert int(cache.get_seq_length()) == 15


def test_models_that_are_not_served(tiny):
    import transformers

    small = dict(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**small, encoder_ffn_dim=32, decoder_ffn_dim=32))
    shared = build("llama")
    shared.config.num_kv_shared_layers = 1
    chunks = build("llama")
    chunks.config.layer_types = ["chunked_attention"] * 2
    chunks.config.attention_chunk_size = 8
    mla, eager, bare = tiny("deepseek_v3"), build("llama", "eager"), torch.nn.Linear(2, 2)
    meta = build("llama").to("meta")
    for model, error, message in (
        (bart, errors.ConfigError, "encoder"), (shared, errors.ConfigError, "share K and V"), (chunks, errors.ConfigError, "serves no layer"),
        (mla, errors.ConfigError, "latent"), (eager, errors.ConfigError, '"eager".*set_attn_implementation'), (bare, errors.ConfigError, "Linear"),
        (meta, errors.DeviceError, "one device"), (build("llama").double(), errors.DTypeError, "float64"),
    ):  # fmt: skip
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        with pytest.raises(error, match=message):
            KVCache(model, 16)
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


@pytest.mark.parametrize(("options", "message"), [(dict(max_length=0), "max_length"), (dict(batch=0), "batch"), (dict(max_length=2.5), "2.5"),
                                                  (dict(rollback=-1), "rollback"), (dict(batch=True), "batch")])  # fmt: skip
def test_numbers(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        KVCache(build("llama"), **dict(max_length=16) | options)


# --- bad input: nothing is overwritten ----------------------------------------------------------------------------------


def misuse(model, cache, ids, case):
    """What a caller may do wrong with a cache of ``build("llama")``, 16 tokens, batch 2."""
    others = {"heads": dict(num_key_value_heads=4), "layers": dict(num_hidden_layers=3), "one layer": dict(num_hidden_layers=1)}
    if case in others:
        return build("llama", NAME, **others[case])(ids, past_key_values=cache)
    if case in ("sdpa", "eager"):
        model.set_attn_implementation(case)
        return model(ids, past_key_values=cache)
    if case == "dtype":
        return model.bfloat16()(ids, past_key_values=cache)
    if case == "device":
        return model.to("meta")(ids.to("meta"), past_key_values=cache)
    if case == "dropout":
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model.train()(ids, past_key_values=cache)
    if case == "gradient":
        with torch.enable_grad():
            return model(ids, past_key_values=cache)
    if case == "not causal":
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        return model(ids, past_key_values=cache)
    calls = {
        "long prompt": lambda: model(torch.ones(2, 17, dtype=torch.int64), past_key_values=cache),
        "long prompt, generate": lambda: model.generate(torch.ones(2, 17, dtype=torch.int64), past_key_values=cache, **GREEDY),
        "batch": lambda: model(ids[:1], past_key_values=cache),
        "more than fits": lambda: (model(ids[:, :4], past_key_values=cache), model(torch.ones(2, 13, dtype=torch.int64), past_key_values=cache)),
        "repeat": lambda: cache.batch_repeat_interleave(2),
        "select": lambda: cache.batch_select_indices(torch.tensor([0])),
    }
    return calls[case]()


MISUSE = {
    "heads": (errors.ShapeError, "another model"), "layers": (errors.ConfigError, "3 layers.*2 layers"), "one layer": (errors.ConfigError, "1 layers"),
    "sdpa": (errors.UnsupportedOpError, NAME),
    "eager": (errors.UnsupportedOpError, NAME), "dtype": (errors.DTypeError, "bfloat16.*float32"), "device": (errors.DeviceError, "meta"),
    "dropout": (errors.UnsupportedOpError, "dropout"), "gradient": (errors.UnsupportedOpError, "no_grad"), "not causal": (errors.ConfigError, "causal"),
    "long prompt": (errors.ShapeError, "17 tokens.*16"), "long prompt, generate": (errors.ShapeError, "17 tokens.*16"),
    "batch": (errors.ShapeError, "another batch"), "more than fits": (errors.ShapeError, "17 tokens.*16"),
    "repeat": (errors.UnsupportedOpError, "batch 2"), "select": (errors.UnsupportedOpError, "batch 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
@torch.no_grad()
def test_misuse_is_a_typed_error_before_anything_is_written(case):
    error, message = MISUSE[case]
    model, (ids, _) = build("llama"), prompt(length=6)
    cache = ours(model, 16)
    written = 4 if case == "more than fits" else 0
    with pytest.raises(error, match=message):
        misuse(model, cache, ids, case)
    assert int(cache.get_seq_length()) == written
    assert all(not t[:, :, written:].any() for t in held(cache))


def test_generate_stops_at_the_end_of_the_cache():
    model, (ids, _) = build("llama"), prompt()
    cache = ours(model, 16)
    with pytest.raises(errors.ShapeError, match=r"17 tokens.*16.*max_length"):
        model.generate(ids, past_key_values=cache, **GREEDY)
    assert int(cache.get_seq_length()) == 16


def test_handles_are_no_tensors():
    cache = KVCache(build("llama"), 16)
    k, v = torch.randn(2, 1, 2, 3, 16).unbind()
    key, value = cache.update(k, v, 0)
    for touch in (
        lambda: key.shape, lambda: key[0], lambda: key + 1, lambda: 2 * key, lambda: -key, lambda: torch.cat([key, value]), lambda: key.repeat_interleave(2),
        lambda: len(key), lambda: list(value), lambda: k @ key, lambda: torch.nn.functional.scaled_dot_product_attention(k, key, value),
    ):  # fmt: skip
        with pytest.raises(errors.UnsupportedOpError, match=r"after update\(\).*set_attn_implementation"):
            touch()
    query = torch.randn(1, 4, 3, 16)
    module = torch.nn.Module()
    with pytest.raises(errors.UnsupportedOpError, match="different layers"):
        attention.attention_forward(module, query, key, cache.update(k, v, 1)[1], None)
    with pytest.raises(errors.UnsupportedOpError, match="different layers"):
        attention.attention_forward(module, query, k, value, None)
    with pytest.raises(errors.UnsupportedOpError, match="position_bias"):
        attention.attention_forward(module, query, key, value, None, position_bias=query)
    assert not any(t.any() for t in held(cache))
    attention.attention_forward(module, query, key, value, None)
    with pytest.raises(errors.UnsupportedOpError, match="used before"):
        attention.attention_forward(module, query, key, value, None)


def test_sinks_without_a_cache_are_refused():
    """ "sdpa" would leave them out."""
    model, (ids, _) = build("gpt_oss", NAME), prompt()
    with pytest.raises(errors.UnsupportedOpError, match="sinks"), torch.no_grad():
        model(ids, use_cache=False)


# --- a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_on_a_gpu(family):
    """Logits of a prompt and of steps, eager and in CUDA graphs, against float64 on the CPU; generate() compiles the steps by itself."""
    model, (ids, _) = build(family), prompt()
    want = model.generate(ids, **GREEDY)
    with torch.no_grad():
        exact = model.double()(want).logits
        model = model.float().cuda()
        got = {}
        for mode in ("", "reduce-overhead"):
            cache = KVCache(model, 64, 2)
            step = torch.compile(model, mode=mode, fullgraph=True) if mode else model
            tokens = want.cuda()
            logits = [model(tokens[:, :9], past_key_values=cache).logits]
            logits += [step(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits.clone() for i in range(9, tokens.shape[1])]
            got[mode] = torch.cat(logits, 1).cpu()
            assert float((got[mode].double() - exact).norm() / exact.norm()) < 5e-3  # products of float32 may be TF32
        cache = KVCache(model, 64, 2)
        assert torch.equal(model.generate(ids.cuda(), past_key_values=cache, **GREEDY).cpu(), want)
