"""``recover`` on a GPU: a step is one CUDA graph, the rounding one kernel each way, and both compute what launch by launch computes."""

from __future__ import annotations

import copy

import pytest
import torch

from fp4_inductor import NVFP4Config, Sparse24Config, quantize_model, recover
from fp4_inductor._replay import Runner
from fp4_inductor.models import distil
from fp4_inductor.models.trainable import Trainable, compiled_rounding

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")]
DENSE, SPARSE = NVFP4Config("mse", calibration=None), Sparse24Config("magnitude", accept_loss=True)
RATES = distil.Rates(0.01, 0.01, 0.005)


@pytest.fixture
def pair(tiny):
    def make(kind: str, config):
        source = tiny(kind, torch.float32)
        with torch.no_grad():
            for parameter in source.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        source = source.to("cuda", torch.bfloat16)
        return source, quantize_model(copy.deepcopy(source), config, progress=False)

    return make


def text() -> torch.Tensor:
    return torch.randint(128, (64, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama"])
def test_steps_are_one_graph_and_compute_what_single_launches_do(pair, kind, monkeypatch):
    source, model = pair(kind, SPARSE if kind == "llama" else NVFP4Config("amax"))
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    options = dict(own_text=False, steps=12, rates=RATES, progress=False)
    found, again = recover(model, source, text(), **options), recover(other, source, text(), **options)
    assert not found.slow and found.kept and found.kl_after < 0.98 * found.kl_before
    assert found.kl_after == again.kl_after, "the same twice"
    monkeypatch.setattr(Runner, "WARM", 100)
    slow = recover(third, source, text(), **options)
    assert slow.kl_after == pytest.approx(found.kl_after, rel=0.05)


def test_a_step_that_cannot_be_captured_says_so_and_trains(pair, monkeypatch):
    source, model = pair("qwen2", NVFP4Config("amax"))
    real, seen = distil._loss, []

    def reads(*args):
        loss = real(*args)
        seen.append(float(loss))  # waits for the GPU, which a capture refuses
        return loss

    monkeypatch.setattr(distil, "_loss", reads)
    found = recover(model, source, text(), own_text=False, steps=12, rates=RATES, progress=False)
    assert "not captured" in found.slow and found.slow in str(found)
    torch.randn(4, device="cuda")  # the generator is not left in the capture
    assert found.kept and found.steps == 12


def different(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of numbers that differ by more than the order of three products."""
    return float(((a - b).abs() > 1e-6 * b.abs()).float().mean())


@pytest.mark.parametrize(("n", "k", "config"), [(96, 64, DENSE), (48, 40, DENSE), (576, 1536, DENSE), (96, 64, SPARSE), (576, 1536, SPARSE)])
def test_the_compiled_rounding_is_torchs(n, k, config):
    layer = quantize_model(torch.nn.Sequential(torch.nn.Linear(k, n, device="cuda")), config, progress=False, strict=False)[0]
    plain, compiled = Trainable(layer), Trainable(layer)
    assert compiled_rounding([compiled]) == ""
    with torch.no_grad():
        for a, b in ((plain.values, compiled.values), (plain.log_scale, compiled.log_scale)):
            a.add_(torch.randn_like(a) * a.std())
            b.copy_(a)
    g = torch.randn(n, k, device="cuda")
    (plain.weight * g).sum().backward()
    (compiled.weight * g).sum().backward()
    assert different(compiled.weight, plain.weight) < 1e-3, "but for values within an ulp of the edge between two codes"
    torch.testing.assert_close(compiled.log_scale.grad, plain.log_scale.grad, rtol=0.05, atol=0.02 * float(plain.log_scale.grad.abs().max()))
    assert different(compiled.values.grad, plain.values.grad) < 1e-3
