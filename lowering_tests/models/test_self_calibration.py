"""scale_search="auto" and calibration="self": who writes, what is written, and what happens where nobody can."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import NVFP4Config, errors, quantize_model
from fp4_inductor.decoding.attention import implementations
from fp4_inductor.generation.aside import aside
from fp4_inductor.generation.loop import TheirsError
from fp4_inductor.models import self_calibration


def scales(model):
    return {n: t.view(torch.uint8) for n, t in model.state_dict().items() if n.endswith(".scale")}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_default_is_calibrated_on_what_the_model_writes(tiny):
    dense = tiny("llama", torch.bfloat16)
    text = self_calibration.write(dense)
    model = quantize_model(copy.deepcopy(dense), progress=False)
    assert equal(scales(model), scales(quantize_model(copy.deepcopy(dense), NVFP4Config("activation", calibration=text), progress=False)))
    assert equal(scales(model), scales(quantize_model(copy.deepcopy(dense), NVFP4Config("activation", calibration="self"), progress=False)))
    assert not equal(scales(model), scales(quantize_model(copy.deepcopy(dense), NVFP4Config("mse"), progress=False)))
    report = fp4_inductor.report(model)
    assert "scale_search=activation" in report.config
    assert report.notes == [
        'scale_search="auto": "activation" over 16 tokens that the model wrote itself; not "gptq", because it would take about 0 s (limit 0 s)',
        'attention: fp4.decode_attention for decode steps and over masks on CUDA, "sdpa" for all else',
    ]


def test_batches_given_to_the_default_are_used(tiny):
    dense = tiny("llama", torch.bfloat16)
    batches = [torch.randint(128, (2, 16))]
    default = quantize_model(copy.deepcopy(dense), NVFP4Config(calibration=batches), progress=False)
    assert equal(scales(default), scales(quantize_model(copy.deepcopy(dense), NVFP4Config("activation", calibration=batches), progress=False)))
    assert not equal(scales(default), scales(quantize_model(copy.deepcopy(dense), progress=False)))


def test_writing_repeats_itself_and_leaves_no_trace(tiny):
    model = tiny("qwen3", torch.float32).train()
    model.model.layers[0].eval()
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first, second = self_calibration.write(model), self_calibration.write(model)
    assert torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    assert first[0]["input_ids"].shape == (2, 8)
    assert (first[0]["input_ids"][:, 0] == 1).all()  # its beginning-of-text token
    mixed = self_calibration.write(model, 24, 5, random_first=16)[0]["input_ids"]
    assert mixed.shape == (24, 5)
    assert (mixed[:8, 0] == 1).all()
    assert len(set(mixed[8:, 0].tolist())) > 8
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert not model.model.layers[0].training


def test_what_other_threads_draw_changes_nothing(tiny):
    model = tiny("qwen3", torch.float32)
    want = self_calibration.write(model)[0]["input_ids"]
    before = torch.random.get_rng_state()
    dense = model.forward

    def forward(*args, **kwargs):
        torch.rand(3)  # as another thread would between two steps
        return dense(*args, **kwargs)

    model.forward = forward
    assert torch.equal(self_calibration.write(model)[0]["input_ids"], want)
    assert not torch.equal(torch.random.get_rng_state(), before)  # what was drawn stays drawn


def test_the_sampler_follows_the_probabilities():
    scores = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(20000, 4)
    sampler = self_calibration.Sampler(0)
    share = torch.bincount(sampler(None, scores).argmax(-1), minlength=4) / 20000
    assert (share - scores[0].exp()).abs().max() < 0.02
    many = torch.zeros(2000, 200)
    many[:, :50] = 1.0
    assert int(self_calibration.Sampler(0)(None, many).argmax(-1).max()) < 50


def test_parts_have_their_share_of_random_first_tokens_and_end_in_time(tiny, monkeypatch):
    model = tiny("qwen3", torch.float32)
    whole = self_calibration.write(model, 24, 5, random_first=16, at_once=12)[0]["input_ids"]
    for part in whole.split(12):
        assert (part[:4, 0] == 1).all() and len(set(part[4:, 0].tolist())) > 4
    monkeypatch.setattr(self_calibration.time, "monotonic", iter(range(100)).__next__)
    found = self_calibration.write(model, 24, 5, random_first=16, at_once=6, until=2)[0]["input_ids"]
    assert found.shape == (12, 5), "the third part would end at 3"


def test_the_loop_of_a_gpu_writes_such_text_and_leaves_no_trace(tiny, monkeypatch):
    model = tiny("qwen3", torch.float32)
    first = torch.ones(64, 1, dtype=torch.int64)
    fp4_inductor.generate(model, first[:2], max_new_tokens=2)
    record, cache, names = fp4_inductor.generation_record(model), vars(model)["_fp4_loop"].cache, implementations(model)
    model.set_attn_implementation("sdpa")

    def written(seed: int, likeliest: int) -> torch.Tensor:
        with aside(model):
            return self_calibration._captured(model, 9, seed, likeliest)(first, 0)

    text = written(3, 4)
    assert text.shape == (64, 10) and torch.equal(text, written(3, 4)) and not torch.equal(text, written(4, 4))
    assert implementations(model) == {"": "sdpa"} != names
    assert fp4_inductor.generation_record(model) is record and vars(model)["_fp4_loop"].cache is cache
    logits = model(input_ids=text, use_cache=False).logits
    rank = (logits[:, :-1] > logits[:, :-1].gather(-1, text[:, 1:, None])).sum(-1)
    assert int(rank.max()) == 3, "one of the four likeliest"
    assert len(set(written(3, 0)[:, 1].tolist())) > 4
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    with pytest.raises(TheirsError, match="_can_compile_fullgraph"):  # whose sampling ends in an assertion of the device if scores are no numbers
        written(3, 4)
    assert fp4_inductor.generation_record(model) is record and implementations(model) == {"": "sdpa"}


def test_without_a_first_token_it_starts_at_random(tiny):
    model = tiny("llama", torch.float32)
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    self_calibration.SEQUENCES = 32  # restored by the fixture
    assert len(set(self_calibration.write(model)[0]["input_ids"][:, 0].tolist())) > 16


def test_no_more_tokens_than_positions(tiny, monkeypatch):
    monkeypatch.setattr(self_calibration, "TOKENS", 1000)
    assert self_calibration.write(tiny("gpt2", torch.float32))[0]["input_ids"].shape == (2, 128)


def test_a_model_of_another_kind_takes_the_best_rule_without_data():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64))
    model = quantize_model(copy.deepcopy(dense), progress=False)
    assert equal(scales(model), scales(quantize_model(copy.deepcopy(dense), NVFP4Config("four_over_six"), progress=False)))
    assert fp4_inductor.report(model).notes == ['scale_search="auto": "four_over_six", because Sequential has no generate()']
    with pytest.raises(errors.CalibrationError, match=r"Sequential has no generate\(\).*four_over_six"):
        quantize_model(dense, NVFP4Config("activation", calibration="self"), progress=False)
    assert isinstance(dense[0], nn.Linear)


def test_a_large_model_on_the_cpu_is_not_kept_waiting(tiny, monkeypatch):
    monkeypatch.setattr(self_calibration, "_CPU_PARAMETERS", 1000)
    report = fp4_inductor.report(quantize_model(tiny("llama", torch.float32), progress=False))
    assert "on the CPU (limit" in report.notes[0]
    assert "scale_search=four_over_six" in report.config


def test_a_model_that_fails_to_write_says_so_in_the_report(tiny):
    model = tiny("llama", torch.float32)
    model.generate = lambda **kwargs: (_ for _ in ()).throw(RuntimeError("out of ink"))
    report = fp4_inductor.report(quantize_model(copy.copy(model), progress=False))
    assert "RuntimeError: out of ink" in report.notes[0]
    assert "scale_search=four_over_six" in report.config


def test_a_model_that_overflows_says_so_in_the_report(tiny):
    model = tiny("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(3e38)  # finite weights, infinite activations
    report = fp4_inductor.report(quantize_model(model, progress=False))
    assert report.notes[0].startswith('scale_search="auto": "four_over_six", because calibration: the input of')


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
def test_data_that_would_not_be_used_is_refused(search):
    with pytest.raises(errors.ConfigError, match=search):
        NVFP4Config(search, calibration="self")


def test_many_sequences_are_written_in_parts(tiny, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(self_calibration, "AT_ONCE", 3)
    real, rows = model.generate, []
    monkeypatch.setattr(model, "generate", lambda **kwargs: rows.append(len(kwargs["inputs"])) or real(**kwargs))
    ids = self_calibration.write(model, 8, 6)[0]["input_ids"]
    assert (rows, ids.shape) == ([3, 3, 2], (8, 6))
    assert len({tuple(row) for row in ids.tolist()}) > 4, "each part draws anew"
