"""What the device cannot do runs Transformers' loop: the same result, the reason in the record, one line on stderr."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, StaticCache
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.generation import reasons
from lowering_tests.generation.conftest import build

IDS = torch.randint(3, 128, (2, 6), generator=torch.Generator().manual_seed(0))
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)


class Letters:
    """As much of a tokenizer as stop strings need: token i is the character i."""

    vocab_size = 128

    def get_vocab(self):
        return {chr(i): i for i in range(128)}

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def _convert_id_to_token(self, i):
        return chr(i)

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def __len__(self):
        return 128


CASES = {
    "beam search": ({"num_beams": 2}, "beam search is another way to decode"),
    "beam sample": ({"num_beams": 2, "do_sample": True}, "beam sample is another way to decode"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "ids": IDS[:1], "no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor is not served"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True keeps a tensor of every step"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True keeps"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "ngrams": ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor is not served on the device"),
    "bad words": ({"bad_words_ids": [[5]]}, "NoBadWordsLogitsProcessor"),
    "allowed tokens": ({"prefix_allowed_tokens_fn": lambda batch, ids: [5, 6, 7]}, "PrefixConstrainedLogitsProcessor"),
    "a function": ({"logits_processor": processors.LogitsProcessorList([lambda ids, scores: scores.roll(1, -1)])}, "<lambda>"),
    "time": ({"max_time": 1000.0}, "the stopping criterion MaxTimeCriteria looks at the tokens on the host"),
    "a criterion": (
        {"stopping_criteria": criteria.StoppingCriteriaList([lambda ids, scores, **_: torch.full((ids.shape[0],), ids.shape[1] > 8)])},
        "the stopping criterion <lambda>",
    ),
    "pieces": ({"prefill_chunk_size": 2}, "prefill_chunk_size cuts the prompt"),
}


@pytest.mark.parametrize("door", ["generate", "generate_loop"])
@pytest.mark.parametrize("case", CASES)
def test_transformers_loop_runs_and_the_record_says_why(llama, case, door):
    options, why = CASES[case]
    options = GREEDY | options
    ids = options.pop("ids", IDS)
    torch.manual_seed(1)
    wanted = llama.generate(ids, **options)
    torch.manual_seed(1)
    if door == "generate":
        got = fp4_inductor.generate(llama, ids, **options)
    elif case == "prompt lookup":  # it needs what the convention leaves out
        with pytest.raises(errors.ConfigError, match="assisted generation cannot run behind custom_generate"):
            llama.generate(ids, custom_generate=fp4_inductor.generate_loop, **options)
        return
    else:
        got = llama.generate(ids, custom_generate=fp4_inductor.generate_loop, **options)
    record = fp4_inductor.generation_record(llama)
    assert record.loop == "transformers" and record.steps == 0
    assert len(record.reasons) == 1 and why in record.reasons[0]
    assert why in str(record)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted)
    else:
        assert type(got) is type(wanted) and torch.equal(got.sequences, wanted.sequences)


def test_stop_strings(llama):
    stop = chr(int(llama.generate(IDS[:1], **GREEDY)[0, 8]))
    options = GREEDY | {"stop_strings": stop, "tokenizer": Letters()}
    wanted = llama.generate(IDS[:1], **options)
    assert wanted.shape[1] < 12
    assert torch.equal(fp4_inductor.generate(llama, IDS[:1], **options), wanted)
    assert "stop strings" in fp4_inductor.generation_record(llama).reasons[0]


def test_caches_that_grow(llama):
    for cache in (DynamicCache(config=llama.config),):
        wanted = llama.generate(IDS, **GREEDY)
        assert torch.equal(fp4_inductor.generate(llama, IDS, past_key_values=cache, **GREEDY), wanted)
        record = fp4_inductor.generation_record(llama)
        assert record.reasons == ["a DynamicCache grows: its tensors do not stay where they are"]
        assert cache.get_seq_length() == 11


def test_caches_that_move():
    """Transformers takes these on a GPU only."""
    for name in ("offloaded", "offloaded_static", "quantized"):
        [why] = reasons.of_config(GenerationConfig(cache_implementation=name))
        assert why == f'cache_implementation="{name}" is no cache that stays where it is'
    assert reasons.of_config(GenerationConfig(cache_implementation="static")) == []


def test_an_encoder():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
    assert "the model has an encoder" in fp4_inductor.generation_record(model).reasons
    cache = EncoderDecoderCache(StaticCache(config=config, max_cache_len=16), StaticCache(config=config, max_cache_len=6))
    assert torch.equal(fp4_inductor.generate(model, IDS, past_key_values=cache, **GREEDY), wanted)


@pytest.mark.parametrize(
    ("family", "why"), [("qwen3_next", "keeps its state in another way than a cache"), ("longrope", 'rotary embeddings of the kind "longrope"')]
)
def test_models_that_change_on_the_host(family, why):
    if family == "longrope":
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4, "original_max_position_embeddings": 16}
        model = build("phi3", rope_parameters=rope)
    else:
        model = build(family)
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
    assert any(why in reason for reason in fp4_inductor.generation_record(model).reasons)


def test_a_seed_holds_in_transformers_loop_too(llama):
    options = GREEDY | {"do_sample": True, "temperature": 2.0, "max_time": 1000.0}
    state = torch.get_rng_state()
    first = fp4_inductor.generate(llama, IDS, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(fp4_inductor.generate(llama, IDS, seed=3, **options), first)
    assert not torch.equal(fp4_inductor.generate(llama, IDS, seed=4, **options), first)


def test_one_line_for_each_reason(capsys, monkeypatch):
    monkeypatch.delenv("FP4_INDUCTOR_QUIET")
    model = build("llama")
    for options in ({}, {"max_time": 1000.0}, {"max_time": 1000.0}, {"num_beams": 2}):
        fp4_inductor.generate(model, IDS, **GREEDY | options)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fp4_inductor: generate()")]
    assert lines == [
        "fp4_inductor: generate(): Transformers' loop, because the stopping criterion MaxTimeCriteria looks at the tokens on the host",
        "fp4_inductor: generate(): Transformers' loop, because beam search is another way to decode",
    ]


def test_a_version_of_transformers_that_nobody_examined(monkeypatch):
    model, wanted = build("llama"), build("llama").generate(IDS, **GREEDY)
    for version, device in (("5.17.0", True), ("5.24.1", True), ("5.16.2", False), ("5.25.0", False), ("6.0.0.dev0", False)):
        monkeypatch.setattr("fp4_inductor.generation.loop.transformers_version", lambda version=version: version)
        assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY), wanted)
        record = fp4_inductor.generation_record(model)
        assert record.loop == ("device" if device else "transformers")
        assert record.reasons == ([] if device else [f"Transformers {version}: the loop knows 5.17 to 5.24"])
