"""Bad input: typed, with value, limit and remedy, before anything has run."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

import fp4_inductor
from fp4_inductor import errors
from lowering_tests.generation.conftest import build
from lowering_tests.generation.test_streaming import Kept

IDS = torch.randint(3, 128, (2, 6), generator=torch.Generator().manual_seed(0))
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
SAMPLED = dict(max_new_tokens=6, do_sample=True, pad_token_id=0)
RIGHT = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])

CASES = {
    "a list": (dict(ids=[[1, 2]]), errors.DTypeError, "ids are no token numbers; got list"),
    "floats": (dict(ids=IDS.float()), errors.DTypeError, "got torch.float32; accepted: an int64 tensor"),
    "int32": (dict(ids=IDS.int()), errors.DTypeError, "got torch.int32"),
    "one dimension": (dict(ids=IDS[0]), errors.ShapeError, r"wrong shape; got \[6\]"),
    "no tokens": (dict(ids=IDS[:, :0]), errors.ShapeError, r"got \[2, 0\]"),
    "another device": (dict(ids=IDS.to("meta")), errors.DeviceError, "got meta; accepted: cpu"),
    "no token of the model": (dict(ids=IDS + 200), errors.ConfigError, "accepted: 0 to 127"),
    "a negative token": (dict(ids=-IDS), errors.ConfigError, "no token of the model"),
    "mask of another shape": (dict(attention_mask=torch.ones(2, 5)), errors.ShapeError, r"got \[2, 5\]; accepted: \[2, 6\]"),
    "mask of another batch": (dict(attention_mask=torch.ones(1, 6)), errors.ShapeError, r"got \[1, 6\]"),
    "right padding": (dict(attention_mask=RIGHT), errors.ConfigError, r"padded on the right; got rows \[0\]"),
    "temperature, greedy": (GREEDY | dict(temperature=0.7), errors.ConfigError, "temperature has no effect on greedy tokens; got temperature=0.7"),
    "top_p, greedy": (GREEDY | dict(top_p=0.9), errors.ConfigError, "top_p has no effect"),
    "top_k, greedy by default": (dict(top_k=5, do_sample=None), errors.ConfigError, "top_k has no effect"),
    "temperature 0": (SAMPLED | dict(temperature=0.0), errors.ConfigError, "temperature is out of range; got 0.0.*do_sample=False"),
    "temperature NaN": (SAMPLED | dict(temperature=float("nan")), errors.ConfigError, "got nan"),
    "top_p 0": (SAMPLED | dict(top_p=0.0), errors.ConfigError, "top_p is out of range; got 0.0; accepted: a number above 0, up to 1"),
    "top_p 1.5": (SAMPLED | dict(top_p=1.5), errors.ConfigError, "top_p is out of range"),
    "top_k -1": (SAMPLED | dict(top_k=-1), errors.ConfigError, "top_k is out of range"),
    "top_k 2.5": (SAMPLED | dict(top_k=2.5), errors.ConfigError, "top_k is out of range"),
    "min_p 2": (SAMPLED | dict(min_p=2), errors.ConfigError, "min_p is out of range"),
    "typical_p 0": (SAMPLED | dict(typical_p=0), errors.ConfigError, "typical_p is out of range"),
    "penalty 0": (GREEDY | dict(repetition_penalty=0.0), errors.ConfigError, "repetition_penalty is out of range"),
    "no new tokens": (dict(max_new_tokens=0), errors.ConfigError, "max_new_tokens is out of range; got 0"),
    "more at least than at most": (dict(min_new_tokens=9), errors.ConfigError, "min_new_tokens is above max_new_tokens; got 9; accepted: at most 6"),
    "two limits": (dict(max_length=20), errors.ConfigError, "two limits of one thing"),
    "check_every 0": (dict(check_every=0), errors.ConfigError, "check_every"),
    "seed -1": (SAMPLED | dict(seed=-1), errors.ConfigError, "seed is out of range"),
    "seed 2**63": (SAMPLED | dict(seed=2**63), errors.ConfigError, "seed is out of range"),
    "compiled": (dict(compiled="yes"), errors.ConfigError, "compiled is not a known choice"),
    "twice": (dict(loop=fp4_inductor.LoopOptions(), seed=1), errors.ConfigError, "loop and its fields"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_runs(llama, case, monkeypatch):
    options, error, words = CASES[case]
    options = {k: v for k, v in (GREEDY | options).items() if v is not None}
    monkeypatch.setattr(type(llama), "forward", lambda *a, **k: pytest.fail("the model has run"))
    streamer = Kept()
    with pytest.raises(error, match=words) as caught:
        fp4_inductor.generate(llama, options.pop("ids", IDS), streamer=streamer, **options)
    assert caught.value.value is not None and caught.value.limit is not None and caught.value.remedy
    assert streamer.got == [] and streamer.ends == 0


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None])
def test_no_language_model(model):
    with pytest.raises(errors.ConfigError, match="writes no text"):
        fp4_inductor.generate(model, IDS)


# --- caches -------------------------------------------------------------------------------------------------------


def filled(model, rows: int = 2, length: int = 16) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=length)
    fp4_inductor.generate(model, IDS[:1].expand(rows, -1), past_key_values=cache, **GREEDY)
    return cache


@pytest.mark.parametrize("door", ["generate", "generate_loop"])
def test_what_does_not_fit_the_cache(llama, door):
    def run(ids, cache, **options):
        if door == "generate":
            return fp4_inductor.generate(llama, ids, past_key_values=cache, **GREEDY | options)
        return llama.generate(ids, custom_generate=fp4_inductor.generate_loop, past_key_values=cache, **GREEDY | options)

    other = build("llama", num_hidden_layers=1)
    empty = lambda length, model=llama: StaticCache(config=model.config, max_cache_len=length)  # noqa: E731
    for cache, ids, options, words in (
        (empty(5), IDS, {}, "the prompt is longer than the cache; got 6 tokens; accepted: 5 tokens"),
        (empty(10), IDS, {}, r"prompt and max_new_tokens do not fit the cache; got 6 \+ 6 tokens; accepted: 10 tokens"),
        (filled(llama, rows=1), IDS, {}, "the batch does not fit the cache; got 2 rows; accepted: 1 rows"),
        (empty(32, other), IDS, {}, "a cache of another model; got 1 layers; accepted: 2 layers"),
        (filled(llama), IDS, {"max_new_tokens": 3}, "the cache holds the whole prompt already; got 6 tokens, 11 of them in the cache"),
    ):
        before = int(cache.get_seq_length())
        with pytest.raises(errors.ShapeError, match=words):
            run(ids, cache, **options)
        assert int(cache.get_seq_length()) == before
    assert run(IDS, empty(11)).shape == (2, 12)  # the last token is not put into it


def test_a_cache_in_use(llama):
    cache = StaticCache(config=llama.config, max_cache_len=32)
    caught = []

    class Second(Kept):
        def put(self, value):
            if len(self.got) == 3:
                for run in (
                    lambda: fp4_inductor.generate(llama, IDS, past_key_values=cache, **GREEDY),
                    lambda: llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, past_key_values=cache, **GREEDY),
                    lambda: fp4_inductor.release_memory(cache),
                ):
                    with pytest.raises(errors.CacheInUseError, match="in use by another generate") as error:
                        run()
                    caught.append(error.value)
                # Without a cache of the caller's the second call has one of its own.
                caught.append(fp4_inductor.generate(llama, IDS, **GREEDY))
            super().put(value)

    wanted = llama.generate(IDS, **GREEDY)
    assert torch.equal(fp4_inductor.generate(llama, IDS, past_key_values=cache, streamer=Second(), **GREEDY), wanted)
    assert len(caught) == 4 and torch.equal(caught[3], wanted)
    nested = Second()
    cache.reset()
    caught.clear()
    cache = StaticCache(config=llama.config, max_cache_len=32)
    inner = []

    class Inner(Kept):
        def put(self, value):
            if len(self.got) == 2:
                inner.append(fp4_inductor.generate(llama, IDS, **GREEDY))
            super().put(value)

    assert torch.equal(fp4_inductor.generate(llama, IDS, streamer=Inner(), **GREEDY), wanted) and torch.equal(inner[0], wanted)
    assert nested.got == []


# --- logits -------------------------------------------------------------------------------------------------------


def spoiled(monkeypatch, model, at: int, value: float, row: int = 1):
    """The scores of token ``at`` (from 1) of one row hold ``value``."""
    forward, calls = model.lm_head.forward, []

    def head(hidden):
        logits = forward(hidden).clone()
        calls.append(1)
        if len(calls) == at:
            logits[row, -1, 7] = value
            if value == -torch.inf:
                logits[row, -1, :] = value
        return logits

    monkeypatch.setattr(model.lm_head, "forward", head)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [1, 4])
def test_scores_without_a_finite_largest_one_are_told_at_the_next_look(llama, monkeypatch, value, at, sample):
    options = SAMPLED | {"seed": 1, "top_p": 0.9, "temperature": 0.7} if sample else GREEDY
    wanted = fp4_inductor.generate(llama, IDS, **options)
    with monkeypatch.context() as patched:
        spoiled(patched, llama, at, value)
        streamer = Kept()
        with pytest.raises(errors.NonFiniteError, match=f"the scores of token {at} hold no finite"):
            fp4_inductor.generate(llama, IDS, check_every=2, streamer=streamer, **options)
        assert fp4_inductor.generation_record(llama).looks == (1 if at == 1 else 3)
        assert len(streamer.got) <= at and streamer.ends == 1
    assert torch.equal(fp4_inductor.generate(llama, IDS, **options), wanted)


def test_a_row_that_has_ended_may_hold_anything(llama, monkeypatch):
    eos = int(llama.generate(IDS, **GREEDY)[1, 6])
    options = GREEDY | {"eos_token_id": eos}
    wanted = llama.generate(IDS, **options)
    assert (wanted[1, 7:] == 0).all()
    spoiled(monkeypatch, llama, 3, float("nan"))
    assert torch.equal(fp4_inductor.generate(llama, IDS, **options), wanted)
