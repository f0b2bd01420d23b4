"""Prompts whose decoder layers are compiled by themselves: one graph for all layers of a kind, the tokens of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.decoding import layerwise, regions
from fp4_inductor.generation import caches, prompts, session
from lowering_tests.generation.conftest import build
from lowering_tests.generation.standin import Again

IDS = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(3))
MIXED = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
GREEDY = dict(max_new_tokens=1, do_sample=False)


def quantized(family, **fields):
    model = build(family, **{"num_hidden_layers": 4, "max_position_embeddings": 1024} | fields)
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    model.set_attn_implementation("fp4_inductor")
    return model


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device on which prompts are replayed."""
    torch._dynamo.reset()
    counters.clear()
    made = Again()
    monkeypatch.setattr(session, "device_for", lambda device: made)
    return made


# gpt-oss has two kinds of layers, as Gemma 3 has, and experts, as Qwen3 MoE has.
KINDS = [("qwen3", {}, 1), ("gpt_oss", MIXED, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma3", MIXED, 2), ("qwen3_moe", {}, 1)))]


@pytest.mark.parametrize(("family", "fields", "kinds"), KINDS)
def test_one_graph_a_kind_and_the_same_tokens(family, fields, kinds, monkeypatch):
    """Prompts as they are, so that there may be windows, which slide: 16 tokens. Another length is no other graph.

    An empty cache is another graph than one that holds tokens, and one graph is the sampling's.
    """
    monkeypatch.setattr(prompts, "_why_never", lambda *args: "")
    monkeypatch.setattr(prompts, "length_for", lambda *args: None)
    monkeypatch.setattr(session, "MOST", 0)  # as the long prompts
    model = quantized(family, **fields)
    cache, other = (fp4_inductor.KVCache(model, 256) for _ in range(2))
    made = []
    for begin, end in ((40, 45), (17, 60), (150, 200)):
        cache.reset()
        for tokens in (begin, end):
            text = IDS[:, :tokens]
            options = dict(attention_mask=torch.ones_like(text), past_key_values=cache, **GREEDY)
            found = fp4_inductor.generate(model, text, compiled=True, **options)
            other.reset()  # sinks and windows of a text are those of the same cache, in one piece
            assert torch.equal(found, model.generate(text, **options | {"past_key_values": other})), tokens
            assert int(cache.counter.position) == tokens
        made.append(counters["stats"]["unique_graphs"])
        assert not [note for note in fp4_inductor.generation_record(model).notes if "compiled" in note]
    assert made == [2 * kinds + 1] * 3


def test_a_padded_prompt():
    """Replayed, the counter is where the prompt ends."""
    model = quantized("llama")
    cache = fp4_inductor.KVCache(model, 256)
    for tokens in (120, 70, 40):
        cache.reset()
        text = IDS[:, :tokens]
        found = fp4_inductor.generate(model, text, compiled=True, past_key_values=cache, **GREEDY)
        assert torch.equal(found, model.generate(text, **GREEDY))
        assert int(cache.counter.position) == tokens
    assert fp4_inductor.generation_record(model).prompt == "padded to 128 tokens, replayed"
    assert counters["stats"]["unique_graphs"] == 2


def test_a_layer_that_is_not_compiled_by_itself(monkeypatch):
    """It runs as it is, with a note; the next prompt is compiled as a whole."""
    model = quantized("llama")
    plain = regions.call_layer

    def broken(layer, *args, **kwargs):
        torch._dynamo.graph_break()
        return plain(layer, *args, **kwargs)

    monkeypatch.setattr(regions, "call_layer", broken)
    cache = fp4_inductor.KVCache(model, 256)
    text = IDS[:, :40]
    wanted = model.generate(text, **GREEDY)
    for _ in range(2):
        cache.reset()
        assert torch.equal(fp4_inductor.generate(model, text, compiled=True, past_key_values=cache, **GREEDY), wanted)
        assert int(cache.counter.position) == 40
        notes = fp4_inductor.generation_record(model).notes
        assert len(notes) == 1 and notes[0].startswith("a layer of a prompt (LlamaDecoderLayer) is not compiled: ")
    assert counters["stats"]["unique_graphs"] == 2, "the whole prompt and the sampling"


def test_where_prompts_are_compiled_as_a_whole(device, monkeypatch):
    """Where none is replayed, because none is to be or because the device cannot, too."""
    from transformers import StaticCache

    model = quantized("llama")
    cache = fp4_inductor.KVCache(model, 256)
    fp4_inductor.generate(model, IDS[:, :9], compiled=True, past_key_values=cache, pad_prompts=False, **GREEDY)
    held = caches.holder_of(cache).session
    assert held._layers is not None and not held._layers.kinds
    monkeypatch.setattr(prompts, "length_for", lambda *args: None)
    cache.reset()
    fp4_inductor.generate(model, IDS[:, :30], compiled=True, past_key_values=cache, **GREEDY)
    assert not held._layers.kinds, "a short one that is not padded"
    device.captures = False
    other = fp4_inductor.KVCache(model, 256)
    fp4_inductor.generate(model, IDS[:, :9], compiled=True, past_key_values=other, **GREEDY)
    assert caches.holder_of(other).session._layers is None
    assert layerwise.why_not(model, fp4_inductor.KVCache(model, 64)) == ""
    assert layerwise.why_not(model, StaticCache(config=model.config, max_cache_len=64)) == "not all layers of the cache are a KVCache's"
    few = quantized("llama", num_hidden_layers=2)
    assert layerwise.why_not(few, fp4_inductor.KVCache(few, 64)) == "not all decoder layers are regions"
