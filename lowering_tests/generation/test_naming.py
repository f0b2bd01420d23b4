"""A cache is called ``past_key_values``, and ``cache`` from Transformers 5.24 on."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers.generation import utils

import fp4_inductor
from fp4_inductor.decoding import naming
from fp4_inductor.decoding.naming import NAMES, cache_name
from fp4_inductor.generation import lookup, prompts, reasons, session, step
from lowering_tests.generation.conftest import build
from lowering_tests.generation.texts import drafting

IDS = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(3))
GREEDY = dict(max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("door", ["generate", "generate_loop"])
def test_both_names_are_taken(llama, name, door):
    """By generate() under every Transformers, by generate_loop as ``model.generate`` takes them. The name that comes back is Transformers' own."""
    wanted = llama.generate(IDS, **GREEDY)
    cache = fp4_inductor.KVCache(llama, 64)
    options = GREEDY | {name: cache, "return_dict_in_generate": True}
    if door == "generate":
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # Transformers warns of a name that it will drop
            output = fp4_inductor.generate(llama, IDS, **options)
    elif cache_name() == "past_key_values" and name == "cache":
        with pytest.raises(ValueError, match="not used by the model"):
            llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, **options)
        return
    else:
        output = llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, **options)
    assert torch.equal(output.sequences, wanted) and output[cache_name()] is cache
    assert int(cache.get_seq_length()) == wanted.shape[1] - 1 and fp4_inductor.generation_record(llama).loop == "device"


def test_both_names_at_once(llama):
    with pytest.raises(fp4_inductor.errors.ConfigError, match="two names of one thing; got both; accepted: one of the two"):
        fp4_inductor.generate(llama, IDS, past_key_values=fp4_inductor.KVCache(llama, 64), cache=fp4_inductor.KVCache(llama, 64), **GREEDY)


@pytest.mark.parametrize(("names", "wanted"), [(["past_key_values", "cache_params", "state"], "past_key_values"), (["cache", "state"], "cache")])
def test_the_name_is_read_from_transformers(names, wanted, monkeypatch):
    monkeypatch.setattr(utils, "ALL_CACHE_NAMES", names)
    assert naming.cache_name.__wrapped__() == wanted


def test_a_model_whose_code_has_the_other_name(monkeypatch):
    """It would leave the cache out, among its ``**kwargs``: Transformers' loop runs, and the record says why."""
    model = build("llama")
    forward, others = model.forward, {"past_key_values": lambda past_key_values=None, **kwargs: forward(past_key_values=past_key_values, **kwargs)}
    others["cache"] = lambda cache=None, **kwargs: forward(cache=cache, **kwargs)
    assert naming.named_otherwise(model) == ""
    monkeypatch.setattr(model, "forward", others.pop(cache_name()))
    assert naming.named_otherwise(model) == ""
    [(name, other)] = others.items()
    monkeypatch.setattr(model, "forward", other)
    assert naming.named_otherwise(model) == name
    assert reasons.of_model(model, {}) == [f"the model's code calls its cache {name}, which Transformers calls {cache_name()}"]


def test_the_name_that_a_layer_is_called_with():
    assert [naming.name_in(arguments) for arguments in ({"past_key_values": 1}, {"cache": 1, "x": 2}, {})] == ["past_key_values", "cache", "cache"]


@pytest.mark.parametrize("drafts", [{}, drafting(2)], ids=["one token", "drafts"])
def test_the_model_is_called_with_the_other_name(drafts, monkeypatch):
    """A model whose arguments are renamed as a Transformers of the other kind has them: prompt, padded prompt, step and step of drafts use that name alone."""
    model = build("llama")
    wanted = model.generate(IDS, **GREEDY)
    theirs, other = cache_name(), next(name for name in NAMES if name != cache_name())
    forward, prepare, called = model.forward, model.prepare_inputs_for_generation, []

    def renamed(arguments, old, new):
        assert old not in arguments or new not in arguments
        return {new if name == old else name: value for name, value in arguments.items()}

    def later_forward(input_ids=None, position_ids=None, logits_to_keep=0, **arguments):
        called.append(theirs not in arguments and other in arguments)
        return forward(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **renamed(arguments, other, theirs))

    def later_prepare(ids, **arguments):
        assert theirs not in arguments
        return renamed(prepare(ids, **renamed(arguments, other, theirs)), theirs, other)

    monkeypatch.setattr(model, "forward", later_forward)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", later_prepare)
    for module in (lookup, prompts, session, step):
        monkeypatch.setattr(module, "cache_name", lambda: other)
    assert torch.equal(fp4_inductor.generate(model, IDS, **GREEDY, **drafts), wanted)
    assert fp4_inductor.generation_record(model).loop == "device" and len(called) > 1 and all(called)
