"""The cache of a call that brings none: a KVCache, or a StaticCache and why."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from transformers import StaticCache

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.decoding import attention, cache
from fp4_inductor.decoding import ranks as decoding_ranks
from fp4_inductor.generation import caches
from lowering_tests.generation.conftest import build
from lowering_tests.generation.test_streaming import Kept, same
from lowering_tests.generation.texts import drafting

IDS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(3))
GREEDY = dict(max_new_tokens=26, do_sample=False)


def held(model):
    return vars(model)["_fp4_loop"].cache


def notes(model) -> list[str]:
    record = fp4_inductor.generation_record(model)
    assert (record.loop, record.reasons) == ("device", [])
    return record.notes


def test_it_is_a_kv_cache():
    """And the record says that its attention was selected. Prompt lookup takes the same one."""
    model = build("qwen3")
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
    assert isinstance(held(model), fp4_inductor.KVCache) and notes(model) == ['attention: "fp4_inductor" in the place of "sdpa"']
    fp4_inductor.generate(model, IDS[:1], **GREEDY)
    first = held(model)
    fp4_inductor.generate(model, IDS[:1], **GREEDY, **drafting(3))
    assert held(model) is first


GIB = 1 << 30
SIZES = [(36, 8, 1, 80, 4096), (36, 8, 8, 80, 512), (36, 8, 4, 24, 256), (2, 2, 1, 80, 4096), (80, 64, 64, 24, 256)]


def on_a_gpu(monkeypatch, layers, heads, memory):
    """A model of these sizes, of which nothing else is asked, on a GPU of ``memory`` GiB."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=memory * GIB))
    config = types.SimpleNamespace(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=128)
    return types.SimpleNamespace(config=types.SimpleNamespace(get_text_config=lambda decoder: config), dtype=torch.bfloat16, device=torch.device("cuda"))


@pytest.mark.parametrize(("layers", "heads", "batch", "memory", "tokens"), SIZES)
def test_how_long_it_is_at_least(layers, heads, batch, memory, tokens, monkeypatch):
    """On a GPU what a 128th of its memory holds, 4,096 tokens at most, so that later calls with longer texts need no other graphs; on a CPU 256."""
    model = on_a_gpu(monkeypatch, layers, heads, memory)
    assert caches.least_length(model, batch) == tokens
    assert tokens == 256 or 2 * layers * heads * 128 * 2 * batch * tokens <= memory * GIB / 128
    model.device = torch.device("cpu")
    assert caches.least_length(model, batch) == 256


def test_a_rank_holds_its_own_heads(monkeypatch):
    """Of two ranks each has half of them, and room for twice the tokens."""
    model = on_a_gpu(monkeypatch, layers=36, heads=8, memory=80)
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    monkeypatch.setattr(decoding_ranks, "ranks_of", lambda model: decoding_ranks.Ranks(0, 2, None, plan))
    assert caches.least_length(model, 8) == 1024


def test_it_is_as_long_as_the_least_and_kept_for_shorter_texts(monkeypatch):
    monkeypatch.setattr(caches, "least_length", lambda model, batch: 2048)
    model = build("qwen3")
    fp4_inductor.generate(model, IDS, **GREEDY)
    first = held(model)
    assert first.max_length == min(2048, model.config.max_position_embeddings)
    fp4_inductor.generate(model, IDS[:, :2], **GREEDY)
    assert held(model) is first


def test_prompts_of_all_lengths_are_one_graph(monkeypatch):
    model = build("qwen3")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for tokens in (9, 5, 7):
        wanted = model.generate(IDS[:, :tokens], **GREEDY)
        before = len(graphs)
        assert torch.equal(fp4_inductor.generate(model, IDS[:, :tokens], compiled=True, **GREEDY), wanted)
        assert len(graphs) == before or tokens == 9, "another prompt is compiled again"


def test_of_a_quantized_model_there_is_nothing_to_tell():
    model = fp4_inductor.quantize_model(build("llama"), fp4_inductor.NVFP4Config("amax"), progress=False)
    fp4_inductor.generate(model, IDS, **GREEDY)
    assert isinstance(held(model), fp4_inductor.KVCache) and notes(model) == []


EAGER = 'over a StaticCache: KVCache: the model\'s attention does not read it; got "eager"'
WHY = {
    "gpt_oss": EAGER,
    # Where Transformers' "sdpa" refuses soft-caps, it runs Gemma 2 in "eager".
    "gemma2": 'over a StaticCache: a KVCache computes soft-caps, which the attention "sdpa" leaves out' if caches.sdpa_leaves_softcaps_out() else EAGER,
    "mistral": "over a StaticCache: KVCache does not serve layers of sliding_attention",
}


@pytest.mark.parametrize("family", WHY)
def test_it_is_a_static_cache_where_a_kv_cache_does_not_serve(family, monkeypatch):
    if family == "mistral":
        monkeypatch.setattr(cache, "_SERVED", {"full_attention"})
    model = build(family)
    wanted = model.generate(IDS, **GREEDY)
    for _ in range(2):
        assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
        assert isinstance(held(model), StaticCache) and len(notes(model)) == 1 and notes(model)[0].startswith(WHY[family])


def test_that_of_a_prompt_lookup_is_not_taken_where_another_one_would_be_made(over_static):
    model = build("llama")
    wanted = model.generate(IDS[:1], **GREEDY)
    fp4_inductor.generate(model, IDS[:1], **GREEDY, **drafting(3))
    assert isinstance(held(model), fp4_inductor.KVCache)
    assert torch.equal(fp4_inductor.generate(model, IDS[:1], **GREEDY), wanted)
    assert isinstance(held(model), StaticCache)


def test_soft_caps_over_a_kv_cache_where_sdpa_refuses_them(monkeypatch):
    """Transformers runs Gemma 2 in ``"eager"`` there; with the attention that the note asks for, it has a KVCache, and the tokens are the same."""
    monkeypatch.setattr(caches, "sdpa_leaves_softcaps_out", lambda: False)
    model = build("gemma2", attn_implementation="eager")
    wanted = model.generate(IDS, **GREEDY)
    fp4_inductor.generate(model, IDS, **GREEDY)
    assert isinstance(held(model), StaticCache) and notes(model)[0].startswith(EAGER)
    assert 'model.set_attn_implementation("fp4_inductor")' in notes(model)[0]
    model.set_attn_implementation("fp4_inductor")
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
    assert isinstance(held(model), fp4_inductor.KVCache) and notes(model) == []
    drafted = fp4_inductor.generate(model, IDS[:1], **GREEDY, **drafting(3))
    assert torch.equal(drafted, wanted[:1]) and notes(model) == []


@pytest.mark.parametrize("door", ["generate", "generate_loop"])
def test_a_model_that_computes_with_keys_itself(door, monkeypatch):
    """Its prompt fails over a KVCache, and is run again over a StaticCache. The streamer sees one answer; later calls do not try it again."""
    model, tries = build("llama"), []
    wanted, theirs = model.generate(IDS, **GREEDY), Kept()
    model.generate(IDS, streamer=theirs, **GREEDY)
    monkeypatch.setattr(attention, "attend", lambda query, key, *rest: tries.append(1) or key[0])
    for _ in range(2):
        streamer = Kept()
        if door == "generate":
            got = fp4_inductor.generate(model, IDS, streamer=streamer, **GREEDY)
        else:
            got = model.generate(IDS, custom_generate=fp4_inductor.generate_loop, streamer=streamer, **GREEDY)
        assert torch.equal(got, wanted) and same(streamer, theirs) and len(tries) == 1
        assert isinstance(held(model), StaticCache)
        assert len(notes(model)) == 1 and notes(model)[0].startswith("over a StaticCache: KVCache: K or V was touched after update()")
        assert notes(model)[0].endswith('attention: "fp4_inductor" in the place of "sdpa"')
    kept = fp4_inductor.KVCache(model, 64, 3)
    with pytest.raises(errors.UnsupportedOpError, match="was touched"):  # one that somebody asked for
        fp4_inductor.generate(model, IDS, past_key_values=kept, **GREEDY)
    assert not caches.is_in_use(kept)


def test_an_error_that_has_nothing_to_do_with_the_cache_is_raised(monkeypatch):
    model, streamer = build("llama"), Kept()

    def refuse(*args, **kwargs):
        raise errors.UnsupportedOpError("a layer", value="it", limit="another", remedy="none")

    monkeypatch.setattr(model.model.layers[1], "forward", refuse)
    with pytest.raises(errors.UnsupportedOpError, match="a layer; got"):
        fp4_inductor.generate(model, IDS, streamer=streamer, **GREEDY)
    assert streamer.ends == 1 and len(streamer.got) == 1 and not caches.is_in_use(held(model))


@pytest.mark.parametrize("check_every", [8, 200])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_returned_cache_gives_the_steps_that_were_too_many_back(family, check_every):
    """A ring gives back as many as its ``rollback``; if more could be needed, every token is looked at."""
    model = build(family)
    options = GREEDY | dict(max_new_tokens=250)
    eos = int(model.generate(IDS[:1], **options)[0, 9 + 150])
    options |= dict(eos_token_id=eos, pad_token_id=1)
    wanted = model.generate(IDS[:1], **options)
    output = fp4_inductor.generate(model, IDS[:1], check_every=check_every, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, wanted) and isinstance(output.past_key_values, fp4_inductor.KVCache)
    assert int(output.past_key_values.get_seq_length()) == wanted.shape[1] - 1
    looked = any("every token is looked at" in note for note in notes(model))
    assert looked == (family == "gemma3" and check_every == 200)
