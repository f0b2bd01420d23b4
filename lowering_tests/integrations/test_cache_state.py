"""KVCache.state_dict and load_state_dict: a text goes on as if nothing had happened; what does not fit is refused, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import KVCache, errors
from fp4_inductor.formats import kv
from lowering_tests.integrations.test_cache import build, ours

PROMPT, STEPS = 90, 6
IDS = torch.randint(3, 97, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model, cache, begin, end, ids=IDS):
    return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(begin, end)], 1)


def filled(model, batch=2, length=128, kv="bf16", **options):
    cache = ours(model, length, batch, kv=kv, **options)
    with torch.no_grad():
        model(IDS[:batch, :PROMPT], past_key_values=cache)
    return cache


def clones(cache):
    return [t.view(torch.uint8).clone() for layer in cache._ours for t in layer.tensors]


@pytest.mark.parametrize("name", kv.NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_text_goes_on(family, name):
    """In a longer cache that held another text, through a file."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(family)
    cache = filled(model, kv=name)
    state = safetensors.load(safetensors.save(cache.state_dict()))
    assert state["layers.1.keys"].shape[2] == PROMPT, "only what is filled"
    want = logits(model, cache, PROMPT, PROMPT + STEPS)
    other = ours(model, 200, 2, kv=name)
    logits(model, other, 0, 5, IDS.flip(1))
    other.load_state_dict(state)
    assert int(other.get_seq_length()) == PROMPT
    assert torch.equal(logits(model, other, PROMPT, PROMPT + STEPS), want)
    other.load_state_dict(cache.state_dict())  # and again, as the first one is now
    assert int(other.get_seq_length()) == PROMPT + STEPS


def test_nothing_is_shared():
    model = build("llama")
    cache = filled(model)
    state = cache.state_dict()
    before = {key: t.clone() for key, t in state.items()}
    logits(model, cache, PROMPT, PROMPT + 2)
    cache.reset()
    assert all(torch.equal(t, before[key]) for key, t in state.items())
    places = [t.data_ptr() for layer in cache._ours for t in layer.tensors]
    cache.load_state_dict(state)
    assert places == [t.data_ptr() for layer in cache._ours for t in layer.tensors], "compiled graphs go on with it"


def test_a_prompt_of_many_texts():
    """A state of one sequence is that of each sequence of a batch."""
    model = build("gemma3")
    one = filled(model, batch=1)
    many = ours(model, 128, 2)
    many.load_state_dict(one.state_dict())
    after = IDS[:1].expand(2, -1)
    want = logits(model, one, PROMPT, PROMPT + STEPS, after[:1])
    got = logits(model, many, PROMPT, PROMPT + STEPS, after)
    torch.testing.assert_close(got, want.expand_as(got))


def test_generate_goes_on():
    """The whole text again: only what is new is computed, as over a cache that was never saved."""
    model = build("qwen3")
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(IDS))
    cache = filled(model)
    want = model.generate(IDS, past_key_values=cache, **options)
    cache = filled(model)
    other = ours(model, 128, 2)
    other.load_state_dict(cache.state_dict())
    assert torch.equal(model.generate(IDS, past_key_values=other, **options), want)


def test_what_crop_refuses_it_refuses_afterwards():
    model = build("mistral")  # a window of 12
    cache = filled(model, rollback=8)
    cache.crop(-5)
    other = ours(model, 128, 2, rollback=8)
    other.load_state_dict(cache.state_dict())
    with pytest.raises(errors.UnsupportedOpError, match="a window of 12 that holds 20 tokens, of 90"):
        other.crop(-6)
    other.crop(-3)
    cache.crop(-3)
    at = PROMPT - 8
    assert torch.equal(logits(model, other, at, at + STEPS), logits(model, cache, at, at + STEPS))


def test_whether_a_batch_is_padded_is_kept():
    model = build("llama")
    for padded in (None, True, False):
        cache, other = filled(model), ours(model, 128, 2)
        cache.counter.padded = padded
        other.load_state_dict(cache.state_dict())
        assert other.counter.padded is padded


def changed(**entries):
    return lambda state: {**state, **{key.replace("__", "."): change(state[key.replace("__", ".")]) for key, change in entries.items()}}


def without(*keys):
    return lambda state: {key: t for key, t in state.items() if key not in keys}


# what -> (of which cache, into which, what is done to the state, error, words)
REFUSED = {
    "a model with fewer layers": ({}, {}, without("layers.1.keys", "layers.1.values"), errors.ConfigError, "missing ['layers.1.keys', 'layers.1.values']"),
    "a tensor of something else": ({}, {}, lambda s: {**s, "lm_head.weight": torch.zeros(1)}, errors.ConfigError, "unknown ['lm_head.weight']"),
    "another format": (dict(kv="k8v4"), {}, None, errors.ConfigError, "layers.0.key_scale"),
    "a format with the same names": (dict(kv="fp8"), dict(kv="fp8"), changed(layers__1__keys=lambda t: t.float()), errors.DTypeError, "layers.1.keys"),
    "other heads": ({}, {}, changed(layers__0__values=lambda t: t[:, :1]), errors.ShapeError, "layers.0.values"),
    "another batch": ({}, dict(batch=3), None, errors.ShapeError, "which may be 1"),
    "too many tokens": ({}, dict(length=80), None, errors.ShapeError, "position 90"),
    "counts without meaning": ({}, {}, changed(furthest=lambda t: t - 1), errors.ShapeError, "furthest 89"),
    "tokens that are missing": ({}, {}, changed(layers__1__keys=lambda t: t[:, :, 1:]), errors.ShapeError, "89 tokens"),
    "a window that kept fewer": (dict(rollback=4), dict(rollback=9), None, errors.ShapeError, "rollback of the one that was saved"),
    "exact tokens of another ring": (dict(kv="nvfp4", rollback=4), dict(kv="nvfp4", rollback=9), None, errors.ShapeError, "rollback"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_changed(what):
    source, target, change, error, words = REFUSED[what]
    model = build("gemma3")
    state = filled(model, **source).state_dict()
    target = dict(target)
    cache = ours(model, target.pop("length", 128), target.pop("batch", 2), **target)
    logits(model, cache, 0, 3, IDS[:1].expand(cache.batch, -1))
    before = clones(cache)
    with pytest.raises(error) as caught:
        cache.load_state_dict(change(state) if change else state)
    assert words in str(caught.value)
    assert all(map(torch.equal, clones(cache), before)) and int(cache.get_seq_length()) == 3


def test_layers_of_transformers_are_refused():
    cache = ours(build("llama"), 32, 2)
    cache.layers[1] = object()
    for call in (cache.state_dict, lambda: KVCache.load_state_dict(cache, {})):
        with pytest.raises(errors.UnsupportedOpError, match="object"):
            call()
