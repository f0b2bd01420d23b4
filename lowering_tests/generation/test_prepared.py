"""What generate() hands on to ``model.generate``: the config that Transformers would make itself, without the work of making it again."""

from __future__ import annotations

import warnings

import pytest
import torch

import fp4_inductor
from fp4_inductor.generation import prepared
from lowering_tests.generation.conftest import build

IDS = torch.arange(3, 12)[None]
OPTIONS = (
    {}, {"max_new_tokens": 3}, {"max_length": 12}, {"max_new_tokens": 4, "min_new_tokens": 2}, {"min_length": 10, "max_length": 14},
    {"max_new_tokens": 3, "eos_token_id": None}, {"max_new_tokens": 3, "eos_token_id": [5, 7], "pad_token_id": 0},
    {"max_new_tokens": 3, "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": None}, {"max_new_tokens": 3, "do_sample": False},
    {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": False, "use_cache": True}, {"max_new_tokens": 2, "num_return_sequences": 1},
)  # fmt: skip


def seen(model, options, given=None):
    """What a decoding loop gets: the config's values, the tensors' names, and warnings on the way."""
    found = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        values = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in generation_config.to_dict().items()}
        found.update(values=values, names=sorted(kwargs), criteria=[type(one).__name__ for one in stopping_criteria])
        return input_ids

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.generate(IDS, custom_generate=loop, **(options if given is None else given))
    return found | {"told": [str(one.message) for one in told]}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("own", [{}, {"eos_token_id": 9, "max_length": 40}, {"temperature": 0.4, "do_sample": True}], ids=str)
def test_the_config_is_the_one_that_transformers_makes(options, own):
    """``own``: of the model's generation config."""
    model = build("llama")
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    options = dict(options, attention_mask=torch.ones_like(IDS))
    config = prepared.of(model, None, {name: value for name, value in options.items() if name != "attention_mask"})
    given = prepared.handed_on(model, config, options)
    assert set(given) == {"generation_config", "attention_mask"}
    assert seen(model, options, given) == seen(model, options)


def test_a_default_config_is_not_made(monkeypatch):
    model = build("llama")
    wanted = model.generate(IDS, max_new_tokens=3, do_sample=False)
    monkeypatch.setattr(type(model.config), "_get_generation_parameters", lambda self: pytest.fail("looked for"))
    assert torch.equal(fp4_inductor.generate(model, IDS, max_new_tokens=3, do_sample=False), wanted)


def test_parameters_in_the_models_config_are_refused_as_before():
    model = build("llama")
    model.config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match="control generation"):
        fp4_inductor.generate(model, IDS, max_new_tokens=3)


def test_a_given_config_is_handed_on_as_it_is():
    model = build("llama")
    mine = model.generation_config
    options = {"generation_config": mine}
    config = prepared.of(model, mine, {})
    assert prepared.handed_on(model, config, options) is options and type(mine).__name__ == "GenerationConfig"
