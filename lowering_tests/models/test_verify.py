"""``verify``: figures against ``evaluate``, shares of layers against what each layer measures by itself, and models that have none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import NVFP4Config, Sparse24Config, errors, evaluate, quantize_model, verify
from fp4_inductor.models import gptq
from fp4_inductor.models.evaluate import predictions
from fp4_inductor.models.verify import own_windows
from fp4_inductor.modules import FP4Experts

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")


def sharp(tiny, name: str):
    """A model with something to lose, all of whose layers matter: its blocks change what it predicts."""
    model = tiny(name, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_shares_are_what_each_layer_measures_alone(tiny, kind):
    model = sharp(tiny, kind)
    done = quantize_model(copy.deepcopy(model), NVFP4Config("mse", siblings="separate"), progress=False)
    windows = torch.randint(128, (8, 65))
    got = verify(done, model, windows)
    assert got.model == evaluate(done, windows, reference=model) and got.source == evaluate(model, windows)
    names = {name for name, m in done.named_modules() if type(m).__name__ in ("FP4Linear", "FP4Experts")}
    assert {i.name for i in got.layers} == names and got.notes == ()
    assert sum(i.share for i in got.layers) == pytest.approx(1.0)
    assert [i.kl for i in got.layers] == sorted((i.kl for i in got.layers), reverse=True)
    reference, ratios = predictions(model, windows), []
    for share in (*got.layers[:3], *got.layers[-2:]):
        one = copy.deepcopy(model)
        one.set_submodule(share.name, done.get_submodule(share.name))
        ratios.append(share.kl / evaluate(one, windows, reference=reference).kl)
    # A token that goes to another expert is no small error: what experts cost is predicted too low.
    assert all((0.5 if kind == "llama" else 0.1) < r < 2.0 for r in ratios), ratios
    kinds = got.kinds
    assert sum(count for count, _ in kinds.values()) == len(names) and sum(s for _, s in kinds.values()) == pytest.approx(1.0)
    assert not any(m._forward_hooks for m in model.modules()) and all(p.grad is None for p in model.parameters())
    lines = str(got).splitlines()
    assert f"{got.model.kl:.5f}" in lines[2] and len(lines) == 4 + len(kinds) + min(len(names), 11) and max(map(len, lines)) <= 80


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_the_report_has_the_same_shares(tiny, kind, monkeypatch):
    """Of "gptq", on the text of its own that was held out; with biases, and with layers that met too few tokens."""
    monkeypatch.setattr(gptq, "SEQUENCES", 8)
    monkeypatch.setattr(gptq, "TOKENS", 48)
    model = sharp(tiny, kind)
    with torch.no_grad():
        for bias in (p for name, p in model.named_parameters() if name.endswith("_proj.bias")):
            bias.normal_(0, 0.2)
    done = quantize_model(copy.deepcopy(model), NVFP4Config("gptq", lm_head="nvfp4"), progress=False)
    held_out = torch.cat([b["input_ids"] for b in gptq.text(model, [])[1]])
    want = {s.name: s.kl for s in fp4_inductor.models.layer_shares.layer_shares(done, model, held_out)[0] if s.name != "lm_head"}
    report = fp4_inductor.report(done)
    got = {r.name: r.predicted_kl for r in report.layers if r.predicted_kl is not None}
    first = {f"{name}.gate_up_proj": name for name, m in done.named_modules() if isinstance(m, FP4Experts)}
    assert got.keys() == {*want} - {*first.values()} | {*first} and len(got) >= 10
    assert {first.get(n, n): kl for n, kl in got.items()} == pytest.approx(want, rel=1e-3)
    worst = max(got, key=got.__getitem__)
    text = str(report)
    assert f"largest shares of the KL, each layer alone, predicted: {sum(got.values()):.4f} nats a token" in " ".join(text.split())
    assert f"{100 * got[worst] / sum(got.values()):4.1f}%  {got[worst]:.5f}  {worst}\n" in text


def test_a_report_without_shares(tiny):
    """Of no other search, nor of a model that writes no text."""
    model = tiny("llama", torch.float32)
    for config in (NVFP4Config("mse"), NVFP4Config("activation", calibration="self")):
        report = fp4_inductor.report(quantize_model(copy.deepcopy(model), config, progress=False))
        assert all(r.predicted_kl is None for r in report.layers) and "largest shares" not in str(report)


def test_a_layer_that_is_damaged_is_found(tiny):
    model = sharp(tiny, "llama")
    done = quantize_model(copy.deepcopy(model), NVFP4Config("mse"), progress=False)
    done.model.layers[1].mlp.up_proj.scale.view(torch.uint8)[::3] += 4
    got = verify(done, model, torch.randint(128, (4, 33)))
    assert got.layers[0].name == "model.layers.1.mlp.up_proj" and got.layers[0].share > 0.2 and got.layers[0].output_error > 0.1


def test_sparse_layers_and_heads_have_shares_too(tiny):
    model = sharp(tiny, "llama")
    windows = torch.randint(128, (4, 33))
    sparse = quantize_model(copy.deepcopy(model), Sparse24Config("magnitude", accept_loss=True), progress=False)
    dense = quantize_model(copy.deepcopy(model), NVFP4Config("mse", lm_head="fp8"), progress=False)
    a, b = verify(sparse, model, windows), verify(dense, model, windows)
    assert len(a.layers) == 14 and len(b.layers) == 15 and "lm_head" in {i.name for i in b.layers}
    assert sum(i.kl for i in a.layers) > 5 * sum(i.kl for i in b.layers)


def test_text_of_its_own_is_not_what_is_calibrated_on(tiny):
    model = tiny("llama", torch.float32)
    windows = own_windows(model, 6, 20)
    assert windows.shape == (6, 21) and torch.equal(windows, own_windows(model, 6, 20))
    calibrated = fp4_inductor.models.self_calibration.write(model, 6, 21, random_first=3)[0]["input_ids"]
    assert not torch.equal(windows, calibrated)
    done = quantize_model(copy.deepcopy(model), NVFP4Config("amax"), progress=False)
    assert verify(done, model, layers=False).model.positions == 16 * 127  # the model has 128 positions
    assert verify(done, model, layers=False).layers == ()


def test_models_without_shares_say_why(tiny, monkeypatch):
    model = tiny("llama", torch.float32)
    done = quantize_model(copy.deepcopy(model), NVFP4Config("amax"), progress=False)
    windows = torch.randint(128, (2, 9))
    model.model.layers[0].mlp.forward = torch.no_grad()(model.model.layers[0].mlp.forward)
    got = verify(done, model, windows)
    assert len(got.layers) == 11 and got.notes[0].startswith("3 layers were not reached: model.layers.0.mlp.")
    del done.model.layers[0].self_attn.q_proj
    done.model.layers[0].self_attn.q_proj2 = copy.deepcopy(done.model.layers[0].self_attn.k_proj)
    assert (
        "1 layers have no counterpart in the source: model.layers.0.self_attn.q_proj2" in fp4_inductor.models.layer_shares.layer_shares(done, model, windows)[1]
    )

    class Bigram(nn.Module):
        def forward(self, input_ids, use_cache=False):
            return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, 128).float()})

    assert verify(Bigram(), Bigram(), windows).notes == ("no shares of layers, because Bigram is no causal language model of transformers",)


def test_refusals(tiny):
    model = tiny("llama", torch.float32)
    with pytest.raises(errors.ConfigError, match="with itself"):
        verify(model, model)
    with pytest.raises(errors.CalibrationError, match="no generate"):
        verify(nn.Linear(2, 2), nn.Linear(2, 2))
