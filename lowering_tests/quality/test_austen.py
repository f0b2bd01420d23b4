"""What NVFP4 costs a trained model, in nats per byte on text it has not seen, against recorded figures.

Protocol: the first 32 x 512 bytes of the held-out novel, float32 arithmetic, every linear weight
but embedding, head and router. "activation" is calibrated on 16 x 512 bytes from byte 100,000 on, which are not evaluated.
"w4a4": the activations rounded to NVFP4, too.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.integrations.transformers import use_experts_backend
from fp4_inductor.models import self_calibration
from fp4_inductor.modules import FP4Experts
from fp4_inductor.report import Report

ASSETS = Path(__file__).resolve().parents[2] / "examples" / "assets"
WINDOW, EVALUATED, CALIBRATION_START, CALIBRATED = 512, 32, 100_000, 16

BF16 = {"austen_dense": 1.2144, "austen_sparse24": 1.2471, "austen_moe": 1.2032}
# Added nats per byte, measured with torch 2.13 on a CPU; the spread over calibration texts is 0.0005.
ADDED = {
    ("austen_dense", "amax"): 0.0104,
    ("austen_dense", "four_over_six"): 0.0073,
    ("austen_dense", "mse"): 0.0083,
    ("austen_dense", "activation"): 0.0059,
    ("austen_dense", "amax w4a4"): 0.0288,
    ("austen_dense", "activation w4a4"): 0.0235,
    ("austen_sparse24", "amax"): 0.0129,
    ("austen_sparse24", "four_over_six"): 0.0104,
    ("austen_sparse24", "mse"): 0.0078,
    ("austen_sparse24", "activation"): 0.0034,
    ("austen_moe", "amax"): 0.0126,
    ("austen_moe", "four_over_six"): 0.0124,
    ("austen_moe", "mse"): 0.0080,
    ("austen_moe", "activation"): 0.0068,
}
TOLERANCE = 0.0008
LIMIT = {"default": 0.009, "activation": 0.007}
OWN_TEXT = self_calibration.SEQUENCES, self_calibration.TOKENS  # which conftest.py makes shorter
MOE_LIMIT = 0.013  # with experts and attention in FP4; a wrong expert costs +3.5


@functools.cache
def _bytes() -> torch.Tensor:
    return torch.frombuffer(bytearray((ASSETS / "northanger_abbey_200k.txt").read_bytes()), dtype=torch.uint8).long()


def _model(name: str):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()


@torch.no_grad()
def nats_per_byte(model) -> float:
    text = _bytes()
    rows = torch.stack([text[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(EVALUATED)])
    losses = [F.cross_entropy(model(input_ids=r[:, :-1], use_cache=False).logits.float().flatten(0, 1), r[:, 1:].flatten()) for r in rows.split(16)]
    return float(torch.stack(losses).mean())


def _config(search: str) -> NVFP4Config:
    if search.endswith(" w4a4"):
        return replace(_config(search.removesuffix(" w4a4")), prefill="nvfp4")
    if search == "default":
        return NVFP4Config()
    if search.endswith("head"):
        return NVFP4Config("four_over_six", lm_head=search.split()[0])
    if search != "activation":
        return NVFP4Config(search)
    text = _bytes()[CALIBRATION_START : CALIBRATION_START + CALIBRATED * WINDOW].view(CALIBRATED, WINDOW)
    return NVFP4Config("activation", calibration=[{"input_ids": rows, "use_cache": False} for rows in text.split(8)])


def added(name: str, search: str) -> float:
    return quantized(name, search)[0] - base(name)


@functools.cache
def quantized(name: str, search: str) -> tuple[float, Report]:
    model = _model(name)
    fp4_inductor.quantize_model(model, _config(search), progress=False)
    report = fp4_inductor.report(model)
    assert report.coverage == 100.0
    return nats_per_byte(model), report


@functools.cache
def base(name: str) -> float:
    return nats_per_byte(_model(name))


@pytest.mark.parametrize("name", BF16)
def test_the_unquantized_models_are_what_was_recorded(name):
    assert base(name) == pytest.approx(BF16[name], abs=2e-4)


# "four_over_six" and "activation" try what "amax" and "mse" try, and more.
CASES = [pytest.param(*case, marks=[pytest.mark.slow] if case[1] in ("amax", "mse") else []) for case in ADDED]


@pytest.mark.parametrize(("name", "search"), CASES)
def test_recorded_cost(name, search):
    # A last bit that differs between CPUs is another code where activations have four bits: 0.0235 and 0.0253 on two kinds of Xeon.
    assert added(name, search) == pytest.approx(ADDED[name, search], abs=2.5e-3 if "w4a4" in search else TOLERANCE)


def test_what_the_report_says_of_rounded_activations():
    """KL on the calibration text, by the report: of the whole, and of the weights alone."""
    report = quantized("austen_dense", "activation w4a4")[1]
    assert report.kl == pytest.approx(0.0476, rel=0.03)
    (note,) = (n for n in report.notes if n.startswith('prefill="nvfp4"'))
    assert float(note.split(" of it from the weights")[0].split()[-1]) == pytest.approx(0.0166, rel=0.03)


@pytest.mark.parametrize("search", LIMIT)
def test_the_bars_on_the_dense_model(search, monkeypatch):
    monkeypatch.setattr(self_calibration, "SEQUENCES", OWN_TEXT[0])
    monkeypatch.setattr(self_calibration, "TOKENS", OWN_TEXT[1])
    assert added("austen_dense", search) <= LIMIT[search]


@pytest.mark.slow
def test_calibration_is_worth_it():
    for name in ("austen_dense", "austen_sparse24"):
        assert added(name, "activation") < min(added(name, s) for s in ("amax", "four_over_six", "mse")), name


@pytest.mark.slow
def test_calibration_is_worth_it_for_experts():
    assert added("austen_moe", "activation") < min(added("austen_moe", s) for s in ("amax", "four_over_six", "mse"))


@pytest.mark.parametrize("path", ["container", "bfloat16", "transformers backend", "grouped_mm on dequantised", "saved and loaded"])
def test_every_path_of_the_experts_stays_within_the_bar(path, tmp_path):
    """The same quantized experts by every way they can run; "bfloat16" against the dense model in bfloat16 arithmetic, the rest in float32."""
    model = _model("austen_moe")
    fp4_inductor.quantize_model(model, NVFP4Config("four_over_six"), progress=False)
    assert fp4_inductor.report(model).coverage == 100.0
    experts = {n: m for n, m in model.named_modules() if isinstance(m, FP4Experts)}
    assert len(experts) == 4
    if path == "bfloat16":
        model = model.bfloat16()
    elif path == "saved and loaded":
        fp4_inductor.save(model, tmp_path)
        model = fp4_inductor.load(lambda: type(model)(model.config), tmp_path)
    elif path != "container":
        dense = _model("austen_moe")
        for name, module in experts.items():
            own = dense.get_submodule(name)
            for part in ("gate_up_proj", "down_proj"):
                w = getattr(module, part).weight
                setattr(own, part, torch.nn.Parameter(w if path.startswith("transformers") else w.dequantize(torch.float32), requires_grad=False))
            model.set_submodule(name, own)
        if path.startswith("transformers"):
            assert use_experts_backend(model)
        else:
            model.set_experts_implementation("grouped_mm")
    dense_cost = nats_per_byte(_model("austen_moe").bfloat16()) if path == "bfloat16" else base("austen_moe")
    cost = nats_per_byte(model) - dense_cost
    assert cost <= MOE_LIMIT
    assert cost == pytest.approx(ADDED["austen_moe", "four_over_six"], abs=1.5 * TOLERANCE)


def test_a_wrong_expert_shows():
    model = _model("austen_moe")
    fp4_inductor.quantize_model(model, NVFP4Config("four_over_six"), progress=False)
    for m in model.modules():
        if isinstance(m, FP4Experts):
            for w in (m.gate_up_proj, m.down_proj):
                for t in (w.qdata, w.scale.view(torch.uint8), w.global_scale):
                    t.copy_(t.roll(1, 0))
    assert nats_per_byte(model) - base("austen_moe") > 1.0
