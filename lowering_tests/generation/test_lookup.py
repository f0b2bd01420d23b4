"""Prompt lookup: the tokens of the loop without it in fewer steps, whatever was drafted; what the cache then holds; what it refuses."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from transformers import DynamicCache, StaticCache

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor._replay import Runner
from fp4_inductor.decoding.handles import Counter
from fp4_inductor.generation import lookup, session
from fp4_inductor.generation.lookup import Text, drafts
from fp4_inductor.generation.options import Lookup
from lowering_tests.generation.conftest import build
from lowering_tests.generation.standin import Replaying
from lowering_tests.generation.test_bad_input import spoiled
from lowering_tests.generation.test_streaming import Kept
from lowering_tests.generation.texts import drafting, spelled_wrong

IDS = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(3))
NEW = 40
GREEDY = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
SAMPLED = dict(max_new_tokens=NEW, do_sample=True, temperature=0.9, top_k=0, seed=1, pad_token_id=0)


def record_of(model):
    record = fp4_inductor.generation_record(model)
    assert record.loop == "device" and record.reasons == []
    return record


def ring(model, length: int = 128, rollback: int = 128):
    return fp4_inductor.KVCache(model, length, rollback=rollback)


# --- where drafts come from ----------------------------------------------------------------------------------------


def looked_up(tokens: list[int], ngram: int, count: int) -> tuple[list[int], bool]:
    """The longest sequence of last tokens that stands somewhere before, there for the last time, and what follows it."""
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[begin + size + i])
                return longer[len(tokens) :], True
    return tokens[-1:] * count, False


@pytest.mark.parametrize("letters", [1, 2, 5, 100])
def test_drafts_follow_the_last_of_the_longest_matches(letters):
    generator = torch.Generator().manual_seed(letters)
    found_any = set()
    for ngram, count in itertools.product((1, 2, 3, 7), (1, 2, 5)):
        text = Text(Lookup(count, ngram), 600, torch.device("cpu"))
        for length in (2, 3, 4, 5, 9, 30, 300, 600):
            tokens = torch.randint(0, letters, (length,), generator=generator)
            text.tokens[ngram : ngram + length].copy_(tokens)
            text.held.fill_(length)
            wanted, found = looked_up(tokens.tolist(), ngram, count)
            got = drafts(text)
            assert (got[0].tolist(), bool(got[1])) == (wanted, found)
            found_any.add(found)
    assert True in found_any and (letters < 100 or False in found_any)


# --- tokens --------------------------------------------------------------------------------------------------------

CHOICES = {
    "greedy": GREEDY,
    "filters": SAMPLED | dict(top_k=20, top_p=0.9, min_p=0.01),
    "penalty, sampled": SAMPLED | dict(repetition_penalty=1.3),
}


# Filters and penalties see scores, whatever the family: with a window (Gemma 3) and without.
EACH = [
    pytest.param(family, choice, marks=[] if choice == "greedy" or family in ("llama", "gemma3") else pytest.mark.slow)
    for family in ("llama", "qwen3", "mistral", "gemma3")
    for choice in CHOICES
]


@pytest.mark.parametrize(("family", "choice"), EACH)
def test_tokens_are_those_without_it_in_fewer_steps(family, choice, told):
    """Drafts that are all right, that are wrong in every fifth place, and those of the text itself. Windows of 16 tokens slide."""
    model, options = build(family), CHOICES[choice]
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **options)
    assert len(wanted[0].unique()) > 5
    for count in (1, 6):
        assert torch.equal(fp4_inductor.generate(model, IDS, **options, **drafting(count)), wanted)
        told(torch.cat([wanted, IDS], 1))
        assert torch.equal(fp4_inductor.generate(model, IDS, **options, **drafting(count)), wanted)
        record = record_of(model)
        assert record.steps == math.ceil((NEW - 1) / (count + 1)) and record.overrun == 0
        assert (record.accepted, record.drafted) == (NEW - 1 - record.steps, record.steps * count)
        told(torch.cat([spelled_wrong(wanted, 5), IDS], 1))
        assert torch.equal(fp4_inductor.generate(model, IDS, **options, **drafting(count, 2)), wanted)
        record = record_of(model)
        assert 0 < record.accepted <= record.drafted - (count > 1) and record.steps == NEW - 1 - record.accepted


def test_greedy_tokens_of_a_text_that_repeats_are_those_of_transformers():
    """Nothing is told here: this model's answer comes to repeat itself."""
    model = build("gemma3")
    wanted = model.generate(IDS, **GREEDY | {"max_new_tokens": 100})
    for run in (
        lambda **o: fp4_inductor.generate(model, IDS, **o),
        lambda **o: model.generate(IDS, custom_generate=fp4_inductor.generate_loop, **o),
    ):
        assert torch.equal(run(prompt_lookup_num_tokens=3, **GREEDY | {"max_new_tokens": 100}), wanted)
        record = record_of(model)
        assert record.steps < 50 and record.accepted == 99 - record.steps
        assert f"{record.accepted} of {record.drafted} drafted tokens accepted" in str(record)


def test_padding_is_not_attended_to():
    """The answer lies in the masked part of the prompt, where it is found."""
    model = build("llama")
    answer = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **SAMPLED)
    ids = torch.cat([answer, IDS], 1)
    mask = torch.cat([torch.zeros_like(answer), torch.ones_like(IDS)], 1)
    got = fp4_inductor.generate(model, ids, attention_mask=mask, **SAMPLED, **drafting(3))
    assert torch.equal(got[:, answer.shape[1] :], answer) and record_of(model).steps == 10


def test_min_new_tokens_counts_each_token(told):
    """The row may end with its token 13, which is the second one of a step that began with eleven."""
    model = build("llama")
    free = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    for options in (dict(eos_token_id=int(free[0, 9 + 12]), min_new_tokens=12), dict(eos_token_id=free[0, 9:14].tolist(), min_new_tokens=12)):
        wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY, **options)
        assert (wanted.shape[1] == 9 + 13) == torch.equal(wanted, free[:, : wanted.shape[1]])
        told(torch.cat([wanted, IDS], 1))
        assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY, **options, **drafting(4)), wanted)
        assert record_of(model).accepted > 0


def test_drafts_have_no_position_that_the_model_has_not(told):
    """A table of positions that the answer fills; drafts behind its end lie outside."""
    model = build("gpt2", num_key_value_heads=4)
    options = GREEDY | dict(max_new_tokens=128 - 9)
    wanted = model.generate(IDS, **options)
    told(torch.cat([spelled_wrong(wanted, 7), IDS], 1))
    assert torch.equal(fp4_inductor.generate(model, IDS, **options, **drafting(6, 2)), wanted)
    assert record_of(model).accepted > 0


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_row_ends_inside_of_accepted_tokens(family, told):
    model = build(family)
    free = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    told(torch.cat([free, IDS], 1))
    for at in range(12, 20):  # four drafts: each place of a step
        options = GREEDY | dict(eos_token_id=int(free[0, 9 + at]))
        cache, other = ring(model), ring(model)
        wanted = fp4_inductor.generate(model, IDS, past_key_values=other, **GREEDY | {"eos_token_id": options["eos_token_id"]} | {"check_every": 1})
        got = fp4_inductor.generate(model, IDS, past_key_values=cache, check_every=2, **options, **drafting(4))
        length = wanted.shape[1]
        assert length < free.shape[1] and torch.equal(got, wanted) and int(cache.get_seq_length()) == length - 1
        record = record_of(model)
        assert record.tokens == length - 9 and record.accepted > 0
        assert record.steps - record.overrun == math.ceil((record.tokens - 1) / 5)


@pytest.mark.parametrize("new", [1, 2, 3, 5, 6, 7, 11])
def test_a_limit_cuts_accepted_tokens(new, told):
    """And leaves all of them but the last in the caller's cache."""
    model = build("llama")
    whole = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    told(torch.cat([whole, IDS], 1))
    cache = fp4_inductor.KVCache(model, 9 + new + 4)  # as long as it has to be
    got = fp4_inductor.generate(model, IDS, past_key_values=cache, **GREEDY | {"max_new_tokens": new} | drafting(4))
    assert torch.equal(got, whole[:, : 9 + new]) and int(cache.get_seq_length()) == 9 + new - 1
    record = record_of(model)
    assert (record.tokens, record.steps, record.overrun) == (new, math.ceil((new - 1) / 5), 0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_conversation_goes_on_in_the_cache(family, told):
    """Rings of 16 + 5 slots, in which drafts that were wrong overwrite the oldest tokens; with and without prompt lookup in turns."""
    model = build(family)
    cache, other = ring(model, rollback=5), ring(model, rollback=5)
    text, options = IDS, GREEDY | dict(max_new_tokens=15)
    for turn in range(4):
        wanted = fp4_inductor.generate(model, text, past_key_values=other, **options)
        told(torch.cat([spelled_wrong(wanted, 3, text.shape[1]), text], 1))
        extra = drafting(5) if turn != 2 else {}
        assert torch.equal(fp4_inductor.generate(model, text, past_key_values=cache, **options, **extra), wanted)
        assert record_of(model).accepted > 0 or not extra
        assert int(cache.get_seq_length()) == wanted.shape[1] - 1
        text = torch.cat([wanted, IDS[:, :5]], 1)


def test_a_cache_knows_how_far_it_was_written(told):
    """Behind the last token lie drafts, over the oldest tokens of a ring: fewer can be taken back than after a loop without them."""
    model = build("mistral")
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    for extra in ({}, drafting(5)):
        told(torch.cat([wanted, IDS], 1))
        cache = ring(model, rollback=8)
        fp4_inductor.generate(model, IDS, past_key_values=cache, **GREEDY, **extra)
        if extra:
            with pytest.raises(errors.UnsupportedOpError, match="rollback"):
                cache.crop(-7)
        cache.crop(-2 if extra else -7)
        text = wanted[:, : int(cache.get_seq_length()) + 1]
        again = fp4_inductor.generate(model, text, past_key_values=cache, **GREEDY | {"max_new_tokens": wanted.shape[1] - text.shape[1]})
        assert torch.equal(again, wanted)


def test_the_cache_of_the_call_before_is_taken_again():
    model = build("llama")
    fp4_inductor.generate(model, IDS, **GREEDY, **drafting(3))
    held = vars(model)["_fp4_loop"].cache
    assert isinstance(held, fp4_inductor.KVCache)
    fp4_inductor.generate(model, IDS, **GREEDY)
    fp4_inductor.generate(model, IDS, **GREEDY, **drafting(4))
    assert vars(model)["_fp4_loop"].cache is held
    output = fp4_inductor.generate(model, IDS, return_dict_in_generate=True, **GREEDY, **drafting(3))
    assert output.past_key_values is held and int(held.get_seq_length()) == 9 + NEW - 1
    assert torch.equal(output.sequences, fp4_inductor.generate(model, IDS, **GREEDY, **drafting(3)))
    assert int(held.get_seq_length()) == 9 + NEW - 1


# --- on the device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["greedy", "penalty, sampled"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_steps_are_captured_and_replayed(family, choice, monkeypatch, told):
    """The stand-in refuses what the host reads, and knows of no number that changes in Python."""
    device = Replaying()
    model, options = build(family), CHOICES[choice]
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **options)
    monkeypatch.setattr(session, "device_for", lambda device_: device)
    monkeypatch.setattr(Counter, "look", lambda self, queries: None)  # as a capture on CUDA: a CPU's counter costs nothing to read, and is
    told(torch.cat([spelled_wrong(wanted, 7), IDS], 1))
    model = build(family)
    assert torch.equal(fp4_inductor.generate(model, IDS, **options, **drafting(2, 2)), wanted)
    record = record_of(model)
    assert [note for note in record.notes if "captured" in note] == []
    assert (record.captures, len(device.graphs), record.replays) == (1, 1, record.steps - Runner.WARM)
    assert record.steps < 30 and 0 < record.accepted < record.drafted
    again = fp4_inductor.generate(model, IDS, **options, **drafting(2, 2))
    assert torch.equal(again, wanted) and record_of(model).captures == 0 and record_of(model).replays == record.steps
    if choice == "greedy":  # other numbers, same graph: an end, a limit, another prompt
        told(IDS[:, 2:])
        other = fp4_inductor.generate(build(family), IDS[:, 2:], **GREEDY | dict(max_new_tokens=20, eos_token_id=int(wanted[0, -1])))
        got = fp4_inductor.generate(model, IDS[:, 2:], **GREEDY | dict(max_new_tokens=20, eos_token_id=int(wanted[0, -1])), **drafting(2, 2))
        assert torch.equal(got, other) and record_of(model).captures == 0


@pytest.mark.parametrize(("family", "backend"), [("mistral", "aot_eager"), pytest.param("llama", "inductor", marks=pytest.mark.slow)])
def test_compiled_steps_make_the_same_tokens(family, backend, monkeypatch, told):
    model = build(family)
    options = SAMPLED | dict(top_p=0.9, repetition_penalty=1.2)
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **options)
    told(torch.cat([spelled_wrong(wanted, 7), IDS], 1))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    cache = ring(model)
    assert torch.equal(fp4_inductor.generate(model, IDS, compiled=True, past_key_values=cache, **options, **drafting(3)), wanted)
    record = record_of(model)
    assert record.notes == [] and record.accepted > 0 and record.steps < 25


# --- streamers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("check_every", [1, 2, 8])
def test_a_streamer_gets_every_token_once_in_order(check_every, ahead, monkeypatch, told):
    model = build("llama")
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    told(torch.cat([spelled_wrong(wanted, 7), IDS], 1))
    device = session.Host()
    device.ahead = ahead
    monkeypatch.setattr(session, "device_for", lambda device_: device)
    for eos in (None, int(wanted[0, 9 + 22])):
        ends = wanted[:, : 9 + 1 + (wanted[0, 9:] == eos).nonzero()[0].item()] if eos is not None else wanted
        for run in (
            lambda **o: fp4_inductor.generate(model, IDS, **o),
            lambda **o: model.generate(IDS, custom_generate=fp4_inductor.generate_loop, **o),
        ):
            streamer = Kept()
            run(streamer=streamer, check_every=check_every, eos_token_id=eos, **GREEDY, **drafting(3))
            assert record_of(model).accepted > 0
            assert torch.equal(streamer.got[0], IDS) and streamer.ends == 1
            assert torch.cat(streamer.got[1:]).tolist() == ends[0, 9:].tolist()


def test_nan_is_told(monkeypatch):
    model = build("llama")
    spoiled(monkeypatch, model, 3, float("nan"), row=0)  # the last of the positions of that step
    wanted = torch.full((1, NEW), 5)
    monkeypatch.setattr(lookup, "drafts", lambda text: (wanted[0, :2], torch.tensor(True)))
    monkeypatch.setattr(lookup, "choose", right_and_nan(lookup.choose, wanted))
    with pytest.raises(errors.NonFiniteError, match="the scores of token 7 hold no finite"):  # 1 + 3 + 3
        fp4_inductor.generate(model, IDS, **GREEDY, **drafting(2))


def test_nan_behind_a_draft_that_is_wrong_is_none(monkeypatch):
    model = build("llama")
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    assert not (wanted == 2).any()
    monkeypatch.setattr(lookup, "drafts", lambda text: (torch.tensor([2, 2]), torch.tensor(True)))
    spoiled(monkeypatch, model, 3, float("nan"), row=0)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY, **drafting(2)), wanted)


def right_and_nan(choose, wanted):
    """All drafts are right."""

    def chosen(logits, *rest):
        token, finite = choose(logits, *rest)
        return wanted[0, : token.shape[0]], finite

    return chosen


# --- what is refused, and what runs Transformers' loop --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (drafting(0), errors.ConfigError, "prompt_lookup_num_tokens is out of range; got 0; accepted: a whole number from 1"),
        (drafting(2.5), errors.ConfigError, "prompt_lookup_num_tokens is out of range"),
        (drafting(2, 0), errors.ConfigError, "max_matching_ngram_size is out of range; got 0"),
        (drafting(2) | dict(ids=IDS.expand(2, -1)), errors.ConfigError, "prompt lookup is for one row; got 2 rows"),
        (drafting(2) | dict(cache="static"), errors.ConfigError, "takes tokens back from the cache; got StaticCache; accepted: fp4_inductor.KVCache"),
        (drafting(9) | dict(cache="ring"), errors.ConfigError, "above what the cache can take back; got 9; accepted: 8 tokens"),
    ],
)
@pytest.mark.parametrize("door", ["generate", "generate_loop"])
def test_it_is_refused_before_anything_runs(options, error, words, door, monkeypatch):
    model = build("mistral")
    caches = {"static": lambda: StaticCache(config=model.config, max_cache_len=64), "ring": lambda: ring(model, 64, 8), None: lambda: None}
    options = dict(options)
    ids, cache = options.pop("ids", IDS), caches[options.pop("cache", None)]()
    given = {} if cache is None else {"past_key_values": cache}
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("the model has run"))
    own = functools.partial(fp4_inductor.generate, model)
    run = own if door == "generate" else functools.partial(model.generate, custom_generate=fp4_inductor.generate_loop)
    with pytest.raises(error, match=words) as caught:
        run(ids, **GREEDY, **options, **given)
    assert caught.value.value is not None and caught.value.limit is not None and caught.value.remedy
    if door == "generate":
        with pytest.raises(errors.ConfigError, match="prompt lookup is for one row"):
            fp4_inductor.generate(model, IDS, num_return_sequences=2, **SAMPLED, **drafting(2))


def test_the_largest_number_that_a_ring_takes_back(told):
    model = build("mistral")
    wanted = fp4_inductor.generate(model, IDS, past_key_values=ring(model), **GREEDY)
    told(torch.cat([spelled_wrong(wanted, 5), IDS], 1))
    assert torch.equal(fp4_inductor.generate(model, IDS, past_key_values=ring(model, rollback=8), **GREEDY, **drafting(8, 2)), wanted)
    assert record_of(model).accepted > 0


REASONS = {
    "a processor": (dict(no_repeat_ngram_size=2), "NoRepeatNGramLogitsProcessor is not served on the device"),
    "a cache that grows": (dict(past_key_values=DynamicCache), "a DynamicCache grows"),
    "a cache that is full": (dict(past_key_values=fp4_inductor.KVCache), "prompt lookup writes up to 4 tokens behind the text: 52 in a cache for 48"),
    "another attention": (dict(attention="eager"), "prompt lookup needs a KVCache"),
    "stop criteria": (dict(max_time=1000.0), "MaxTimeCriteria"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_runs_transformers_loop_says_why(case):
    model = build("llama")
    options, why = REASONS[case]
    options = GREEDY | options
    if "attention" in options:
        model.set_attn_implementation(options.pop("attention"))
    wanted = model.generate(IDS, **{name: value for name, value in options.items() if name != "past_key_values"})
    if "past_key_values" in options:
        kind = options["past_key_values"]
        options["past_key_values"] = DynamicCache(config=model.config) if kind is DynamicCache else kind(model, 48)
    streamer = Kept()
    assert torch.equal(fp4_inductor.generate(model, IDS, streamer=streamer, **options, **drafting(3)), wanted)
    record = fp4_inductor.generation_record(model)
    assert record.loop == "transformers" and record.steps == 0 and len(record.reasons) == 1 and why in record.reasons[0]
    assert torch.equal(streamer.got[0], IDS) and streamer.ends == 1
    assert torch.cat([put.flatten() for put in streamer.got[1:]]).tolist() == wanted[0, 9:].tolist()


def test_drafts_of_an_assistant_are_another_way_to_decode():
    model, assistant = build("llama"), build("llama")
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS, assistant_model=assistant, **GREEDY, **drafting(2)), wanted)
    assert fp4_inductor.generation_record(model).reasons == ["assisted generation is another way to decode"]
