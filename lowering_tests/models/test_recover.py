"""``recover``: what is trained is what is packed, the KL falls, and after an error, or without a gain, the model is as it was."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config, errors, quantize_model, recover
from fp4_inductor.models import distil, self_calibration
from fp4_inductor.models import recover as training
from fp4_inductor.models.trainable import Trainable
from fp4_inductor.modules import SiblingLinear

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")
RATES = training.Rates(0.01, 0.01, 0.005)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone().reshape(-1).view(torch.uint8) for name, t in model.state_dict().items()}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.fixture
def pair(tiny):
    """``pair("qwen2", config)``: a model with something to lose, and the quantized one."""

    def make(kind: str, config=None, dtype: torch.dtype = torch.float32):
        source = tiny(kind, dtype)
        with torch.no_grad():
            for parameter in source.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return source, quantize_model(copy.deepcopy(source), config or NVFP4Config("amax"), progress=False)

    return make


def text(rows: int = 48, length: int = 24) -> torch.Tensor:
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(3))


def quick(model, source, **options) -> training.Recovery:
    options = {"steps": 12, "rates": RATES, "progress": False, "own_text": False} | options
    return recover(model, source, text(), **options)


@pytest.mark.parametrize("start", ["dense", "spread"])
@pytest.mark.parametrize("k", [64, 40])
def test_what_is_trained_is_what_is_packed(start, k):
    """The straight-through layer computes what the packed one computes, before training and after moving every value."""
    w = torch.randn(48, k)
    w[0] = 0
    layer = FP4Linear.from_weight(w, torch.randn(48), scale_search="mse")
    before, x = bits(layer), torch.randn(5, k)
    trainable = Trainable(layer, w if start == "dense" else None)
    torch.testing.assert_close(trainable(x), layer(x), rtol=1e-5, atol=1e-5)
    assert differ(bits(trainable.pack()), before) <= {"scale", "qdata"}  # of a row of zeros: any scale, and either zero
    assert torch.equal(layer.dequantize(torch.float32), trainable.layer.dequantize(torch.float32))
    torch.testing.assert_close(layer(x), trainable(x), rtol=1e-5, atol=1e-5)
    if start == "dense":  # rounded to nearest: every value is what it was
        inside = w.abs() < 5.5 * layer.scale.float().repeat_interleave(16, 1)[:, :k] * layer.global_scale
        there = torch.isclose((trainable.values * trainable.unit * layer.global_scale)[:, :k], w, rtol=1e-4, atol=1e-6)
        assert there[inside].float().mean() > 0.9  # but for those close to another code
    with torch.no_grad():
        for parameter in (trainable.values, trainable.log_scale, trainable.bias):
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    want = trainable(x)
    want.square().sum().backward()
    assert all((p.grad != 0).float().mean() > 0.4 for p in (trainable.values, trainable.log_scale, trainable.bias))
    torch.testing.assert_close(trainable.pack()(x), want.detach(), rtol=1e-5, atol=1e-5)


def test_a_code_that_is_not_the_nearest_does_not_change_at_once():
    """As "gptq" chooses them for the sake of other weights: a value at the edge of its code would be rounded back by the first step."""
    w = torch.full((16, 32), 0.9)
    w[:, ::16] = 6.0
    layer = FP4Linear.from_weight(torch.where(w < 1, 1.5, w), scale_search="amax")
    trainable = Trainable(layer, w)
    torch.testing.assert_close(trainable.values.detach() * trainable.unit * layer.global_scale, layer.dequantize(torch.float32), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_kl_falls_and_only_what_costs_nothing_moves(pair, kind):
    source, model = pair(kind)
    dense, before = bits(source), bits(model)
    addresses = {n: m.qdata.data_ptr() for n, m in model.named_modules() if isinstance(m, FP4Linear)}
    siblings = {n for n, m in model.named_modules() if isinstance(m, SiblingLinear)}
    flags = [p.requires_grad for p in model.parameters()]
    found = quick(model, source)
    assert found.kept and found.kl_after < 0.98 * found.kl_before and (found.steps, found.tokens) == (12, 12 * 8 * 24)
    moved = differ(bits(model), before)
    assert {name.rpartition(".")[2] for name in moved} == {"qdata", "scale", "bias", "weight"}
    tables = {name for name in moved if name.endswith(".weight") and "norm" not in name and "ln_" not in name}
    assert tables and all(name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")) for name in tables)
    assert differ(bits(source), dense) == set()
    assert {n: m.qdata.data_ptr() for n, m in model.named_modules() if isinstance(m, FP4Linear)} == addresses
    assert {n for n, m in model.named_modules() if isinstance(m, SiblingLinear)} == siblings
    assert [p.requires_grad for p in model.parameters()] == flags and all(p.grad is None for p in (*model.parameters(), *source.parameters()))
    assert str(found) in fp4_inductor.report(model).notes
    # What was measured on the training layers is what the packed model is.
    held = training._rows(source, text(), False)[0][::8]
    with torch.no_grad():
        p, q = (m(held).logits.double().log_softmax(-1) for m in (source, model))
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(found.kl_after, rel=1e-4)


def test_twice_the_same_in_low_precision_and_the_pattern_of_sparse_layers_stays(pair):
    source, model = pair("llama", Sparse24Config("magnitude", accept_loss=True), torch.bfloat16)
    other, before = copy.deepcopy(model), bits(model)
    found, again = quick(model, source, rates=None), quick(other, source, rates=None)
    assert found.kept and (found.kl_before, found.kl_after) == (again.kl_before, again.kl_after)
    assert differ(bits(model), bits(other)) == set()
    assert {name.rpartition(".")[2] for name in differ(bits(model), before)} == {"values", "scale"}


def test_the_source_writes_the_text(pair, monkeypatch):
    monkeypatch.setattr(training, "SEQUENCES", 24)
    monkeypatch.setattr(training, "TOKENS", 16)
    source, model = pair("llama")
    found = recover(model, source, steps=3, rates=RATES, progress=False)
    assert found.text == "384 tokens that the source wrote itself"
    found = recover(model, source, text(), steps=3, rates=RATES, progress=False)
    assert found.text == f"{48 * 24} given tokens and {16 * 24} tokens that the source wrote itself"


def test_text_is_written_in_parts_until_its_time_is_over(pair, monkeypatch):
    monkeypatch.setattr(self_calibration, "AT_ONCE", 16)
    source, _ = pair("llama")
    whole, less = (training.text_of(source, 40 * 8, until, length=8) for until in (float("inf"), 0.0))
    assert whole.shape == (40, 8) and less.shape == (16, 8) and torch.equal(whole[:16], less)
    assert not torch.equal(whole[16:32], less), "each part is another text"


def test_no_gain_changes_nothing(pair):
    source, model = pair("llama")
    before = bits(model)
    found = quick(model, source, rates=training.Rates(3.0, 3.0, 3.0), steps=4)
    assert not found.kept and found.kl_after >= found.kl_before
    assert differ(bits(model), before) == set()
    assert "no gain: the model is as it was" in fp4_inductor.report(model).notes[-1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_error_changes_nothing(pair, monkeypatch, kind):
    source, model = pair("qwen2")
    before, modules, real, calls = bits(model), {n: id(m) for n, m in model.named_modules()}, distil._loss, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 4:
            raise kind("enough")
        return real(*args)

    monkeypatch.setattr(distil, "_loss", fails)
    with pytest.raises(kind):
        quick(model, source)
    assert differ(bits(model), before) == set() and {n: id(m) for n, m in model.named_modules()} == modules


def test_refusals(pair, tiny):
    source, model = pair("llama")
    before = bits(model)
    for call, kind, match in (
        (lambda: recover(source, source), errors.ConfigError, "its source"),
        (lambda: recover(copy.deepcopy(source), source), errors.ConfigError, "no layer to train"),
        (lambda: quick(model, source, steps=0), errors.ConfigError, "steps=0"),
        (lambda: quick(model, source, steps=None, minutes=float("inf")), errors.ConfigError, "an end"),
        (lambda: quick(model, source, own_text=-1), errors.ConfigError, "own_text=-1"),
        (lambda: recover(model, source, torch.zeros(3)), errors.ShapeError, "rows of tokens"),
        (lambda: recover(model, source, text(4), own_text=False), errors.ShapeError, "too little text"),
        (lambda: recover(model, source, text(48, 129), own_text=False), errors.ShapeError, "longer than"),
        (lambda: recover(model, nn.Linear(2, 2)), errors.CalibrationError, "no generate"),
    ):
        with pytest.raises(kind, match=match):
            call()
    monkey = copy.deepcopy(source)
    monkey.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(errors.NonFiniteError, match="loss"):
        quick(model, monkey)
    assert differ(bits(model), before) == set()


def test_long_runs_take_smaller_steps():
    rates = [distil._rate(i, 100, i / 100) for i in range(100)]
    assert max(rates) == pytest.approx(0.98, abs=0.02) and rates[0] == pytest.approx(0.1) and rates[-1] < 1e-3
    longer = [distil._rate(i, 5000, i / 5000) for i in range(5000)]
    assert max(longer) == pytest.approx(0.1**0.8, rel=0.05), "ten times the steps: 0.16 of the size, so that all together go farther, but not ten times"
    assert 1.2 < sum(longer) / sum(distil._rate(i, 500, i / 500) for i in range(500)) < 2
    assert distil._rate(0, math.inf, 0.0) == 0.0, "of how many nobody knows yet"
