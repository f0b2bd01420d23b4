"""Tokens of the loop beside those of Transformers' own, on a CPU: families, batches, ends of rows, caches, seeds."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from transformers import GenerationConfig, StaticCache
from transformers.generation import stopping_criteria as theirs

import fp4_inductor
from lowering_tests.generation.conftest import FAMILIES, build

torch.manual_seed(3)
IDS = torch.randint(3, 128, (3, 9))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 5 + [1] * 4])
GREEDY = dict(max_new_tokens=26, do_sample=False)


def record_of(model):
    record = fp4_inductor.generation_record(model)
    assert record.loop == "device" and record.reasons == []
    return record


def static(model, length: int = 64):
    return StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    model = build(family)
    for options in (GREEDY, GREEDY | {"attention_mask": MASK}):
        ids = IDS if "attention_mask" in options else IDS[:1]
        wanted = model.generate(ids, **options)
        assert len(wanted[0].unique()) > 5, "these tokens would be right by accident"
        assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)
        assert torch.equal(model.generate(ids, custom_generate=fp4_inductor.generate_loop, **options), wanted)
        assert record_of(model).tokens == 26


def test_a_padded_row_is_the_row_alone(llama):
    padded = fp4_inductor.generate(llama, IDS, attention_mask=MASK, **GREEDY)
    alone = fp4_inductor.generate(llama, IDS[2:, 5:], **GREEDY)
    assert torch.equal(padded[2, 5:], alone[0])


def test_a_quantized_model():
    model = fp4_inductor.quantize_model(build("llama"), fp4_inductor.NVFP4Config("amax"), progress=False)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), model.generate(IDS, **GREEDY))
    assert record_of(model).steps == 25


# --- ends of rows -------------------------------------------------------------------------------------------------


def ends(model, *at: int) -> list[int]:
    """Tokens that row i of the greedy answer has at place ``at[i]``."""
    return [int(model.generate(IDS, **GREEDY)[i, 9 + place]) for i, place in enumerate(at)]


@pytest.mark.parametrize("check_every", [1, 3, 8, 100])
def test_rows_end_at_different_times(llama, check_every):
    for eos in (ends(llama, 3, 10, 20), ends(llama, 0), ends(llama, 5)[0]):
        options = GREEDY | {"eos_token_id": eos, "pad_token_id": 1}
        wanted = llama.generate(IDS, **options)
        assert (wanted == 1).any()
        assert torch.equal(fp4_inductor.generate(llama, IDS, check_every=check_every, **options), wanted)


def test_the_host_looks_once_in_check_every_steps(llama):
    fp4_inductor.generate(llama, IDS, check_every=5, **GREEDY)
    record = record_of(llama)
    assert (record.steps, record.looks, record.overrun) == (25, 6, 0)
    eos = ends(llama, 6)[0]
    fp4_inductor.generate(llama, IDS[:1], check_every=5, eos_token_id=eos, pad_token_id=1, **GREEDY)
    record = record_of(llama)
    assert record.steps == record.tokens + record.overrun - 1
    assert 0 < record.overrun < 5 and record.steps % 5 == 0


@pytest.mark.parametrize("options", [{"min_new_tokens": 8}, {"min_length": 20}, {"repetition_penalty": 1.5}, {"suppress_tokens": list(range(40, 90))}], ids=str)
def test_processors_of_greedy_tokens(llama, options):
    options = GREEDY | {"eos_token_id": ends(llama, 2, 4), "pad_token_id": 1, "attention_mask": MASK} | options
    plain = {k: v for k, v in options.items() if k in (*GREEDY, "eos_token_id", "pad_token_id", "attention_mask")}
    wanted = llama.generate(IDS, **options)
    assert not torch.equal(wanted, llama.generate(IDS, **plain))
    assert torch.equal(fp4_inductor.generate(llama, IDS, **options), wanted)


def test_limits_given_in_other_ways(llama):
    for options in (
        {"max_length": 15, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False)},
        {"max_new_tokens": 1, "do_sample": False},
        {"do_sample": False},
        GREEDY | {"stopping_criteria": theirs.StoppingCriteriaList([theirs.MaxLengthCriteria(13)])},
        GREEDY | {"stopping_criteria": theirs.StoppingCriteriaList([theirs.EosTokenCriteria(ends(llama, 4)[0])]), "pad_token_id": 1},
    ):
        options = {k: copy.deepcopy(v) for k, v in options.items()}
        wanted = llama.generate(IDS, **options)
        assert torch.equal(fp4_inductor.generate(llama, IDS, **options), wanted)
        assert record_of(llama).tokens == wanted.shape[1] - 9


# --- samples ------------------------------------------------------------------------------------------------------

SAMPLED = dict(max_new_tokens=12, do_sample=True, temperature=1.5, top_k=0)


def test_samples_depend_on_the_seed_alone(llama):
    run = lambda **options: fp4_inductor.generate(llama, IDS, **SAMPLED | options)  # noqa: E731
    first = run(seed=1)
    torch.manual_seed(99)
    assert torch.equal(run(seed=1), first)
    assert torch.equal(run(seed=1, check_every=1), first)
    assert torch.equal(run(seed=1, max_new_tokens=7), first[:, :16])
    assert torch.equal(llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, seed=1, **SAMPLED), first)
    assert torch.equal(fp4_inductor.generate(llama, IDS, loop=fp4_inductor.LoopOptions(seed=1), **SAMPLED), first)
    assert not torch.equal(run(seed=2), first)


def test_without_a_seed_torch_has_one(llama):
    torch.manual_seed(4)
    first = fp4_inductor.generate(llama, IDS, **SAMPLED)
    second = fp4_inductor.generate(llama, IDS, **SAMPLED)
    seed = record_of(llama).seed
    assert not torch.equal(first, second)
    assert torch.equal(fp4_inductor.generate(llama, IDS, seed=seed, **SAMPLED), second)
    torch.manual_seed(4)
    assert torch.equal(fp4_inductor.generate(llama, IDS, **SAMPLED), first)


def test_the_first_token_of_many_rows_follows_the_distribution(llama):
    from lowering_tests.generation.test_sampling import p_value

    rows = fp4_inductor.generate(llama, IDS[:1], do_sample=True, max_new_tokens=1, num_return_sequences=2000, temperature=2.0, top_k=30, seed=3)
    with torch.no_grad():
        scores = llama(IDS[:1]).logits[0, -1] / 2.0
    scores = scores.masked_fill(scores < scores.topk(30)[0][-1], -torch.inf)
    assert rows.shape == (2000, 10)
    assert p_value(rows[:, -1], scores.softmax(-1)) > 1e-3


# --- caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_conversation_goes_on_in_the_callers_cache(family):
    model = build(family)
    cache = static(model)
    options = GREEDY | {"max_new_tokens": 10}
    first = fp4_inductor.generate(model, IDS, past_key_values=cache, **options)
    assert int(cache.get_seq_length()) == 18
    more = torch.cat([first, IDS[:, :4]], dim=1)
    # In one call from the start the window slides over all tokens, too.
    again = fp4_inductor.generate(model, more, past_key_values=cache, **options)
    theirs_cache = static(model)
    model.generate(IDS, past_key_values=theirs_cache, **options)
    assert torch.equal(again, model.generate(more, past_key_values=theirs_cache, **options))
    assert int(cache.get_seq_length()) == int(theirs_cache.get_seq_length()) == 32


def without_mask(model, input_ids, generation_config, **rest):
    """What Transformers does from 5.18 on: a mask that hides nothing is dropped, and its length is written down."""
    mask = rest.pop("attention_mask", None)
    if mask is not None:
        generation_config._mask_length = mask.shape[1]
    return fp4_inductor.generate_loop(model, input_ids, generation_config=generation_config, **rest)


def test_a_conversation_goes_on_where_a_mask_is_dropped(llama):
    texts = []
    for custom in (None, without_mask):
        cache, ids = static(llama), IDS
        for _ in range(2):
            ids = llama.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, custom_generate=custom, **GREEDY | {"max_new_tokens": 10})
            assert int(cache.get_seq_length()) == ids.shape[1] - 1
            ids = torch.cat([ids, IDS[:, :4]], dim=1)
        texts.append(ids)
    assert record_of(llama).prompt.startswith("as it is")
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_tokens_that_are_too_many_are_taken_back_from_the_cache(family):
    """A full window cannot be shifted back: then every token is looked at."""
    model = build(family)
    for new, at in ((26, 18), (26, 3), (7, 3)):
        eos = int(model.generate(IDS[:1], **GREEDY)[0, 9 + at])
        options = GREEDY | {"max_new_tokens": new, "eos_token_id": eos, "pad_token_id": 1}
        ours, other = static(model), static(model)
        got = fp4_inductor.generate(model, IDS[:1], past_key_values=ours, check_every=4, **options)
        record = record_of(model)
        wanted = model.generate(IDS[:1], past_key_values=other, **options)
        assert torch.equal(got, wanted)
        assert int(ours.get_seq_length()) == int(other.get_seq_length()) == wanted.shape[1] - 1
        slides = family != "llama" and new == 26
        assert (record.overrun == 0 and any("every token" in note for note in record.notes)) if slides else (record.overrun > 0 and not record.notes)
        more = torch.cat([wanted, IDS[1:2]], dim=1)
        options |= {"max_new_tokens": 5}
        if family == "llama" or new == 26:
            assert torch.equal(fp4_inductor.generate(model, more, past_key_values=ours, **options), model.generate(more, past_key_values=other, **options))


def test_the_cache_of_the_call_before_is_taken_again(llama):
    fp4_inductor.generate(llama, IDS, **GREEDY)
    held = vars(llama)["_fp4_loop"].cache
    fp4_inductor.generate(llama, IDS[:, :4], **GREEDY)
    assert vars(llama)["_fp4_loop"].cache is held
    fp4_inductor.generate(llama, IDS[:1], **GREEDY)  # another batch
    assert vars(llama)["_fp4_loop"].cache is not held


def test_a_returned_cache_is_the_callers(llama):
    options = GREEDY | {"return_dict_in_generate": True}
    output = fp4_inductor.generate(llama, IDS, **options)
    assert torch.equal(output.sequences, llama.generate(IDS, **GREEDY))
    assert int(output.past_key_values.get_seq_length()) == 9 + 26 - 1
    fp4_inductor.generate(llama, IDS[:, :5], **GREEDY)
    assert int(output.past_key_values.get_seq_length()) == 9 + 26 - 1


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_comes_and_goes(first):
    model = build("gemma3")
    wanted = fp4_inductor.generate(build("gemma3"), IDS, seed=1, repetition_penalty=1.1, **SAMPLED)
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            assert torch.equal(fp4_inductor.generate(model, IDS, seed=1, repetition_penalty=1.1, **SAMPLED), wanted)


def test_copies_of_model_and_cache_have_nothing_of_the_loop():
    model = build("llama")
    cache = static(model)
    fp4_inductor.generate(model, IDS, past_key_values=cache, **GREEDY)
    for original in (model, cache):
        for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            held = vars(other)["_fp4_loop"]
            assert held is not vars(original)["_fp4_loop"] and held.session is None and held.record is None
    twin = copy.deepcopy(cache)
    more = torch.cat([fp4_inductor.generate(model, IDS, **GREEDY), IDS], dim=1)
    wanted = fp4_inductor.generate(model, more, past_key_values=twin, **GREEDY | {"max_new_tokens": 5})
    assert torch.equal(fp4_inductor.generate(model, more, past_key_values=cache, **GREEDY | {"max_new_tokens": 5}), wanted)


def test_nothing_is_kept_of_a_model_that_is_gone():
    import gc
    import weakref

    model = build("llama")
    fp4_inductor.generate(model, IDS, **GREEDY)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# --- compiled -----------------------------------------------------------------------------------------------------


NOTES = {True: ["over a StaticCache: a test"], False: ['attention: "fp4_inductor" in the place of "sdpa"']}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("family", "backend"), [("gemma3", "aot_eager"), pytest.param("llama", "inductor", marks=pytest.mark.slow)])
def test_compiled_steps_make_the_same_tokens(family, backend, static, monkeypatch, request):
    """Prompt, step and sampling are one graph each. Over a StaticCache Gemma's layers count in Python: their windows become full on the way."""
    if static:
        request.getfixturevalue("over_static")
    model = build(family)
    options = SAMPLED | {"max_new_tokens": 14, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.2}
    wanted = fp4_inductor.generate(model, IDS, **options)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    assert torch.equal(fp4_inductor.generate(model, IDS, compiled=True, **options), wanted)
    assert record_of(model).notes == NOTES[static]


def test_what_does_not_compile_runs_as_it_is_and_says_so(monkeypatch):
    model = build("llama")
    wanted = fp4_inductor.generate(model, IDS, **GREEDY)
    layer = type(model.model.layers[0])
    forward = layer.forward

    def unsupported(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", unsupported)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert torch.equal(fp4_inductor.generate(model, IDS, compiled=True, **GREEDY), wanted)
    assert [note.split(":")[0] for note in record_of(model).notes] == ["attention", "the prompt is not compiled", "the step is not compiled"]
