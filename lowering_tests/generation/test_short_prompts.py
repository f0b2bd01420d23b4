"""Prompts that are padded and replayed, on a stand-in for a CUDA device. Its replay runs the step again: on a CPU a KVCache reads its counter on the host,
which no capture may do."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

import fp4_inductor
from fp4_inductor._replay import Host
from fp4_inductor.generation import prompts, session
from lowering_tests.generation.conftest import build
from lowering_tests.generation.standin import Again

IDS = torch.randint(3, 128, (1, 300), generator=torch.Generator().manual_seed(3))
GREEDY = dict(max_new_tokens=6, do_sample=False)
TAKES_AN_INDEX = "hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)"  # Transformers 5.21 and later


@pytest.fixture(autouse=True)
def device(monkeypatch):
    made = Again()
    monkeypatch.setattr(session, "device_for", lambda device: made)
    return made


def prompt_of(model) -> str:
    record = fp4_inductor.generation_record(model)
    assert record.loop == "device" and f"the prompt {record.prompt}" in str(record)
    return record.prompt


@pytest.mark.parametrize(("tokens", "rows", "room", "length"), [
    (1, 1, 4096, 32), (33, 1, 4096, 128), (128, 1, 128, 128), (129, 1, 4096, 256), (257, 1, 511, None), (4096, 1, 4096, 4096), (4097, 1, 8192, None),
    (500, 8, 4096, 512), (513, 8, 4096, None), (1000, 4, 4096, 1024), (5, 33, 4096, 32), (5, 129, 4096, None),
])  # fmt: skip
def test_lengths(tokens, rows, room, length):
    assert prompts.length_for(tokens, rows, room) == length


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "qwen3_moe"])
def test_tokens_are_those_of_transformers(family):
    """Of prompts of several lengths, of which the second to be padded to 32 is captured and the third replayed; and of a batch."""
    model = build(family, max_position_embeddings=1024)
    for tokens, how in (
        (300, "padded to 512 tokens, not replayed"),
        (9, "padded to 32 tokens, not replayed"),
        (20, "padded to 32 tokens, captured"),
        (1, "padded to 32 tokens, replayed"),
        (128, "padded to 128 tokens, not replayed"),
    ):
        ids = IDS[:, :tokens]
        assert torch.equal(fp4_inductor.generate(model, ids, **GREEDY), model.generate(ids, **GREEDY)), tokens
        assert prompt_of(model) == how
    batch = IDS[:, :60].view(3, 20)
    assert torch.equal(fp4_inductor.generate(model, batch, **GREEDY), model.generate(batch, **GREEDY))
    assert prompt_of(model) == "padded to 32 tokens, not replayed"


def test_a_text_that_goes_on():
    """Behind tokens that the cache holds, until there is no room for padding. The cache counts what is there, and holds it."""
    model = build("qwen3")
    cache = fp4_inductor.KVCache(model, 300)
    text = IDS[:, :0]
    said = []
    for tokens in (20, 7, 90, 40, 60):
        text = torch.cat([text, IDS[:, :tokens]], 1)
        mask = torch.ones_like(text)  # a token that was generated may be that for padding
        wanted = model.generate(text, attention_mask=mask, **GREEDY)
        before = int(cache.counter.position)
        text = fp4_inductor.generate(model, text, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(text, wanted)
        assert int(cache.counter.position) == text.shape[1] - 1
        said.append((before, prompt_of(model)))
    assert said == [
        (0, "padded to 32 tokens, not replayed"),  # of an empty cache: another graph than behind tokens
        (25, "padded to 32 tokens, not replayed"),
        (38, "padded to 128 tokens, not replayed"),
        (134, "padded to 128 tokens, captured"),
        (180, "as it is (1 x 61 tokens, with room for 120 in the cache; padded are up to 4096)"),
    ]


@pytest.mark.parametrize("kv", ["fp8", "k8v4"])
def test_caches_with_a_mean(kv):
    """Padding would count in the mean of K, which is that of the first prompt. Later ones are padded, and the cache holds what it would without."""
    model = build("llama", head_dim=16)
    found = {}
    for pad in (True, False):
        cache = fp4_inductor.KVCache(model, 256, kv=kv)
        for tokens, how in (
            (9, f"as it is (tokens behind the first prompt would count in the mean of K that {kv} keeps)"),
            (30, "padded to 32 tokens, not replayed"),
        ):
            ids = IDS[:, :tokens]
            options = dict(attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False)
            fp4_inductor.generate(model, ids, pad_prompts=pad, **options)
            assert prompt_of(model) == (how if pad else "as it is (pad_prompts=False)")
        found[pad] = cache.state_dict()
    assert int(found[True]["position"]) == 30
    for name, held in found[False].items():
        other = found[True][name]
        assert torch.allclose(held.float(), other.float(), rtol=0.1, atol=1e-3) or (held != other).float().mean() < 0.02, name


def test_a_cache_with_exact_tokens():
    model = build("llama", head_dim=16)
    cache = fp4_inductor.KVCache(model, 256, kv="nvfp4")
    fp4_inductor.generate(model, IDS[:, :9], past_key_values=cache, **GREEDY)
    assert prompt_of(model) == "as it is (tokens behind the prompt would take the place of exact ones that nvfp4 keeps)"


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_rings_that_do_not_come_round(family):
    """Windows of 16 tokens in rings of 144: padded up to there, so that no token takes the place of another; then as it is."""
    model = build(family)
    cache = fp4_inductor.KVCache(model, 256)
    text, said = IDS[:, :0], []
    for tokens in (10, 20, 60):
        text = torch.cat([text, IDS[:, 100 : 100 + tokens]], 1)
        options = dict(attention_mask=torch.ones_like(text), **GREEDY)
        wanted = model.generate(text, **options)
        text = fp4_inductor.generate(model, text, past_key_values=cache, **options)
        assert torch.equal(text, wanted)
        said.append(prompt_of(model))
    assert said == [
        "padded to 32 tokens, not replayed",
        "padded to 32 tokens, not replayed",  # behind 15 tokens
        "as it is (1 x 61 tokens, with room for 103 in the cache; padded are up to 4096)",
    ]


def test_a_model_that_takes_a_number_of_logits_alone(monkeypatch):
    """Its code would read the index of the last token as how many are wanted."""
    model = build("llama")
    source = inspect.getsource(sys.modules[type(model).__module__])
    by_number = "hidden_states = hidden_states[:, -logits_to_keep:]"
    for line in ("slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep", TAKES_AN_INDEX):
        source = source.replace(line, by_number)
    assert by_number in source
    monkeypatch.setattr(inspect, "getsource", lambda module: source)
    wanted = model.generate(IDS[:, :9], **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS[:, :9], **GREEDY), wanted)
    assert prompt_of(model) == "as it is (the model takes no logits_to_keep by index)"


@pytest.mark.parametrize(("line", "takes"), [
    (TAKES_AN_INDEX, True),
    ("slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep", True), ("hidden_states[:, -logits_to_keep:]", False),
])  # fmt: skip
def test_the_code_of_a_model_says_whether_it_takes_an_index(line, takes, monkeypatch):
    monkeypatch.setattr(inspect, "getsource", lambda module: line)
    assert prompts._takes_index(build("llama")) is takes


@pytest.mark.parametrize("mask", [{"full_attention": None}, torch.ones(1, 1, 9, 256, dtype=torch.bool).tril()], ids=["none of a kind", "causal"])
def test_a_mask_that_transformers_makes_of_none_is_left_out(mask, monkeypatch):
    """As 5.21 and later make one for a cache of fixed size. Of a padded batch it stays."""
    model = build("qwen3")
    prepare, seen = model.prepare_inputs_for_generation, []

    def as_later(ids, attention_mask=None, **arguments):
        seen.append(attention_mask)
        inputs = prepare(ids, attention_mask=attention_mask, **arguments)
        return inputs if attention_mask is not None else inputs | {"attention_mask": mask}

    wanted = model.generate(IDS[:, :9], **GREEDY)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", as_later)
    assert torch.equal(fp4_inductor.generate(model, IDS[:, :9], **GREEDY), wanted)
    assert prompt_of(model) == "padded to 32 tokens, not replayed" and seen == [None]


def test_a_padded_batch_is_not_padded_again():
    model = build("llama")
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    ids = IDS[:, :18].view(2, 9)
    wanted = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, ids, attention_mask=mask, **GREEDY), wanted)
    assert prompt_of(model) == "as it is (the model is given attention_mask)"


def test_without_a_device_that_captures(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(session, "device_for", lambda device: Host())
    fp4_inductor.generate(model, IDS[:, :9], **GREEDY)
    assert prompt_of(model) == "as it is (the device captures no graphs)"


def test_where_it_is_not_wanted():
    model = build("llama")
    wanted = model.generate(IDS[:, :9], **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS[:, :9], pad_prompts=False, **GREEDY), wanted)
    assert prompt_of(model) == "as it is (pad_prompts=False)"
    assert torch.equal(model.generate(IDS[:, :9], custom_generate=fp4_inductor.generate_loop, pad_prompts=False, **GREEDY), wanted)
    assert prompt_of(model) == "as it is (pad_prompts=False)"
    with pytest.raises(fp4_inductor.errors.ConfigError, match="pad_prompts is not a known choice"):
        fp4_inductor.LoopOptions(pad_prompts=1)


def test_a_prompt_that_cannot_be_captured_runs_as_it_is_from_then_on(device, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(device, "capture", lambda step: (_ for _ in ()).throw(RuntimeError("not permitted")))
    found = [(fp4_inductor.generate(model, ids, **GREEDY), prompt_of(model)) for ids in (IDS[:, :9], IDS[:, :20], IDS[:, :30])]
    note = "the prompt is not captured: not permitted"
    assert [how for _, how in found] == ["padded to 32 tokens, not replayed", "padded to 32 tokens, not replayed", f"as it is ({note})"]
    for tokens, ids in zip(found, (IDS[:, :9], IDS[:, :20], IDS[:, :30]), strict=True):
        assert torch.equal(tokens[0], model.generate(ids, **GREEDY))


def test_it_is_compiled_once_for_all_lengths():
    """A padded prompt and one that is too long for it are one graph of torch.compile."""
    model = build("llama", max_position_embeddings=1024)
    cache = fp4_inductor.KVCache(model, 300)
    torch._dynamo.reset()
    said, graphs = [], []
    for tokens in (40, 200, 290):
        fp4_inductor.generate(model, IDS[:, :tokens], compiled=True, max_new_tokens=1, past_key_values=cache)
        cache.reset()
        said.append(prompt_of(model).partition(" (")[0])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert said == ["padded to 128 tokens, not replayed", "padded to 256 tokens, not replayed", "as it is"]
    assert graphs == graphs[:1] * 3
