"""scale_search="auto" where "gptq" fits: what is taken, what the report says of it, and what is taken where it does not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import NVFP4Config, errors, quantize_model
from fp4_inductor.models import gptq, output_moments, scale_choice, self_calibration
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.substitute import substituted

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gptq, "SEQUENCES", 16)
    monkeypatch.setattr(gptq, "TOKENS", 32)
    monkeypatch.setattr(scale_choice, "SECONDS", 600.0)


def sharp(tiny, name: str, dtype: torch.dtype = torch.float32):
    """A model with something to lose: its predictions are far from uniform."""
    model = tiny(name, dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def same(a, b) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[n].reshape(-1).view(torch.uint8), second[n].reshape(-1).view(torch.uint8)) for n in first)


def quantized(model, config: NVFP4Config | None = None):
    return quantize_model(copy.deepcopy(model), config, progress=False)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_gptq_is_taken_and_what_it_costs_is_measured(tiny, kind):
    model = sharp(tiny, kind)
    done = quantized(model)
    report = fp4_inductor.report(done)
    assert "scale_search=gptq" in report.config
    assert report.notes[0].startswith('scale_search="auto": "gptq" over 512 tokens that the model wrote itself, tokens weighted by the Fisher information')
    assert report.notes[0].rpartition("; ")[2].removesuffix(" s").isdecimal()
    assert same(done, quantized(model, NVFP4Config("gptq")))
    # The measured KL is that of the model that comes out, and the other one that of the sweep.
    batches, held, _ = gptq.text(model, [])
    ids = torch.cat([b["input_ids"] for b in held])
    assert ids.shape == (8, 32) and not any(torch.equal(row, other) for row in ids for b in batches for other in b["input_ids"])
    sweep = quantized(model, NVFP4Config("activation", calibration=batches))
    with torch.no_grad():
        p, *q = (m(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for m in (model, done, sweep))
        want = [float(F.kl_div(x, p, log_target=True, reduction="sum")) / ids.numel() for x in q]
    assert report.kl == pytest.approx(want[0], rel=2e-2)
    assert report.kl < want[1]
    (line,) = (n for n in report.notes if n.startswith("KL from the dense model on 256 tokens of its own text that were held out: "))
    assert line.endswith(f'{report.kl:.4f} nats a token, by "activation" {line.split()[-1]}')
    assert float(line.split()[-1]) == pytest.approx(want[1], rel=2e-2)


def test_the_sweep_is_taken_where_it_measures_better(tiny, monkeypatch):
    model = sharp(tiny, "llama")
    monkeypatch.setattr(scale_choice, "_kl", lambda *args: (0.5, 0.25))
    done = quantized(model)
    batches = gptq.text(model, [])[0]
    assert same(done, quantized(model, NVFP4Config("activation", calibration=batches)))
    report = fp4_inductor.report(done)
    assert 'scale_search="auto": "activation" over the same text: lower KL (0.2500 against 0.5000)' in report.notes
    assert (report.kl, "scale_search=activation" in report.config) == (0.25, True)


def test_text_that_is_given_joins(tiny):
    model = sharp(tiny, "llama")
    given = [torch.randint(128, (4, 32))]
    assert same(quantized(model, NVFP4Config(calibration=iter(given))), quantized(model, NVFP4Config("gptq", calibration=given)))


@pytest.mark.parametrize("given", [False, True])
def test_less_text_is_taken_where_that_fits(tiny, monkeypatch, given):
    model = sharp(tiny, "llama")
    monkeypatch.setattr(gptq, "SEQUENCES_SHORT", 8)
    monkeypatch.setattr(gptq, "TOKENS_SHORT", 32)
    monkeypatch.setattr(scale_choice, "_CPU_SECONDS", 1e6)
    batches = [torch.randint(128, (4, 32))] if given else None
    done = quantized(model, NVFP4Config(calibration=batches))
    report = fp4_inductor.report(done)
    assert "scale_search=gptq" in report.config
    assert report.notes[0].startswith('scale_search="auto": "gptq" over 256 tokens that the model wrote itself' + " and 1 given batches" * given)
    (note,) = (n for n in report.notes if n.startswith('scale_search="auto": "gptq" with less text than it takes by itself, with which it would take about '))
    assert note.endswith(" s (limit 600 s)")
    assert report.kl is not None
    with monkeypatch.context() as m:
        m.setattr(gptq, "SEQUENCES", 8)
        assert same(done, quantized(model, NVFP4Config("gptq", calibration=batches)))
    assert not same(done, quantized(model, NVFP4Config("gptq", calibration=batches)))


@pytest.mark.parametrize(
    ("seconds", "short", "free", "taken"),
    [(100.0, 50.0, 2**36, None), (1.0, 0.5, 2**36, False), (100.0, 0.5, 2**36, True), (100.0, 0.5, 2**20, None)],
    ids=["neither fits", "all of it fits", "rows one by one fit", "no memory"],
)
def test_on_a_gpu_rows_are_rounded_one_by_one_where_that_fits(tiny, monkeypatch, seconds, short, free, taken):
    """Its time is that of rounding, which less text does not shorten."""
    model, asked = tiny("llama", torch.bfloat16), []
    weights = sum(map(scale_choice.weight_count, (g[0] for g in make_plan(model).groups)))
    monkeypatch.setattr(scale_choice, "_device_of", lambda plan: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(scale_choice, "SECONDS", scale_choice._GPU_TEXT + 10)
    monkeypatch.setattr(scale_choice, "_GPU_SECONDS", seconds / weights)
    monkeypatch.setattr(scale_choice, "_GPU_SECONDS_SHORT", short / weights)

    def prepare(*args, **options):
        asked.append(not options["form"].together)
        raise errors.CalibrationError("asked", value="", limit="", remedy="")

    monkeypatch.setattr(gptq, "prepare", prepare)
    report = fp4_inductor.report(quantized(model))
    assert asked == ([] if taken is None else [taken])
    assert "scale_search=activation" in report.config


def test_a_shorter_form_has_less_text_on_a_cpu_and_rows_by_themselves_on_a_gpu(tiny):
    """The device is that of the layers, wherever a model's first Parameter is."""
    model = tiny("llama")
    whole, *short = (gptq.form_of(model, on) for on in (None, torch.device("cpu"), torch.device("cuda")))
    assert whole == (gptq.SEQUENCES, gptq.TOKENS, True)
    assert short == [(gptq.SEQUENCES_SHORT, gptq.TOKENS_SHORT, True), (gptq.SEQUENCES, gptq.TOKENS, False)]
    settings = [gptq._settings(NVFP4Config(), form) for form in (whole, *short)]
    assert all(a != b for a, b in itertools.combinations(settings, 2)), "another run's layers"
    assert gptq.output_moments_of(model, [[t] for t in make_plan(model).targets])


def test_rows_by_themselves_are_rounded_without_what_puts_them_together(tiny, monkeypatch):
    """The GPU's shorter form, on a CPU: the bits of layers that have too many outputs for a matrix of them."""
    model, config = sharp(tiny, "llama"), NVFP4Config("gptq")
    together = quantized(model, config)
    whole = gptq.form_of
    with monkeypatch.context() as m:
        m.setattr(gptq, "form_of", lambda *args: whole(*args)._replace(together=False))
        apart = quantized(model, config)
    monkeypatch.setattr(output_moments, "MOST", 0)
    assert same(apart, quantized(model, config)) and not same(apart, together)
    (first, *_), (other, *_) = (fp4_inductor.report(m).notes for m in (together, apart))
    assert "together" in first and "together" not in other


@pytest.mark.parametrize("given", [False, True])
def test_what_takes_too_long_is_not_begun(tiny, monkeypatch, given):
    model = tiny("llama", torch.bfloat16)
    monkeypatch.setattr(scale_choice, "SECONDS", 0.001)
    monkeypatch.setattr(gptq, "prepare", None)
    batches = [torch.randint(128, (4, 32))] if given else "self"
    done = quantized(model, NVFP4Config(calibration=batches if given else None))
    assert same(done, quantized(model, NVFP4Config("activation", calibration=batches)))
    text = "the calibration batches" if given else "16 tokens that the model wrote itself"
    note = fp4_inductor.report(done).notes[0]
    assert note.startswith(f'scale_search="auto": "activation" over {text}; not "gptq", because it would take about ')
    assert note.endswith(" s (limit 0 s)")


def test_gptq_that_fails_gives_way(tiny, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    monkeypatch.setattr(gptq, "ENOUGH", 10**6)
    note = fp4_inductor.report(quantized(model)).notes[0]
    assert note.startswith('scale_search="auto": "activation" over 16 tokens')
    assert 'not "gptq", because calibration is too short for scale_search="gptq"' in note


def test_no_memory_for_gptq_gives_way(tiny, monkeypatch):
    """A GPU that another program fills meanwhile, or more than was counted on."""

    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.12 GiB.\nMore lines.")

    model = tiny("llama")
    with monkeypatch.context() as m:
        m.setattr(gptq, "walk", full)
        report = fp4_inductor.report(quantized(model))
        with pytest.raises(torch.OutOfMemoryError, match="1.12 GiB"):
            quantized(model, NVFP4Config("gptq"))
    assert "scale_search=activation" in report.config
    assert report.notes[0].endswith('not "gptq", because it ran out of GPU memory (CUDA out of memory. Tried to allocate 1.12 GiB.)')


def test_what_is_wrong_with_given_text_is_still_an_error(tiny):
    for bad, kind in (([], errors.CalibrationError), ([torch.full((1, 8), 999)], errors.CalibrationError)):
        model = tiny("llama")
        before = copy.deepcopy(model)
        with pytest.raises(kind):
            quantize_model(model, NVFP4Config(calibration=bad), progress=False)
        assert same(model, before)


def test_weights_are_back_after_a_substitution(tiny):
    model = tiny("llama")
    before = copy.deepcopy(model)
    layers = [t.module for t in make_plan(model).targets]
    ids = torch.randint(128, (1, 8))
    want = model(input_ids=ids).logits
    with substituted({(m, "weight"): (lambda m=m: torch.zeros_like(m.weight)) for m in layers} | {(layers[0], "weight"): lambda: None}):
        assert not torch.equal(model(input_ids=ids).logits, want)
        assert same(model, before)
    with substituted({(layers[3], "weight"): lambda: 1 / 0}), pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    with substituted({(layers[3], "weight"): lambda: torch.zeros(64, 64)}), pytest.raises(RuntimeError):
        layers[3](torch.zeros(1, 3))
    assert same(model, before) and torch.equal(model(input_ids=ids).logits, want)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert self_calibration.why_not(model) is None
