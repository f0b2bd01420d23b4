"""What 2:4-sparse experts cost a trained MoE model, in nats per byte on text it has not seen, against recorded figures.

Protocol of test_austen_sparse24.py: float32 arithmetic, the first 8 x 512 bytes of the held-out novel; calibration from byte 100,000 on.
Rotating the experts by one costs more than +1: a wrong expert, or one that was pruned from another's tokens and mixed up, cannot hide.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch

import fp4_inductor
from fp4_inductor import NVFP4Config, Sparse24Config
from fp4_inductor.formats import sparse24
from fp4_inductor.integrations.transformers import use_experts_backend
from fp4_inductor.models.plan import make_plan
from fp4_inductor.modules import FP4Experts, Sparse24ExpertWeight

_SPEC = importlib.util.spec_from_file_location("austen_sparse24", Path(__file__).with_name("test_austen_sparse24.py"))
austen = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(austen)

NAME, WINDOWS = "austen_moe", 8
# Added nats per byte, torch 2.13 on a CPU. SparseGPT: 0.135 with two threads, 0.157 with one, because routers choose by the last bit.
MAGNITUDE, SPARSEGPT = 0.714, 0.146
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")


@functools.cache
def added(pruning: str, calibrated: int) -> float:
    """Experts and attention, all 2:4."""
    model = austen.quantized(NAME, Sparse24Config(pruning, calibration=austen.calibration(calibrated) if calibrated else None, accept_loss=True))
    assert fp4_inductor.report(model).bits_per_weight == 3.5
    assert all(type(m.down_proj) is Sparse24ExpertWeight for m in model.modules() if isinstance(m, FP4Experts))
    return austen.nats_per_byte(model, WINDOWS) - austen.base(NAME, WINDOWS)


@pytest.mark.slow  # the dense model's is not
def test_sparsegpt_costs_less_than_half_of_magnitude():
    magnitude, sparsegpt = added("magnitude", 0), added("sparsegpt", 12)
    austen._show(magnitude=magnitude, sparsegpt=sparsegpt)
    assert magnitude == pytest.approx(MAGNITUDE, abs=0.02)
    assert sparsegpt == pytest.approx(SPARSEGPT, abs=0.03)
    assert sparsegpt <= 0.5 * magnitude


def pruned_in_float32():
    """The model with every weight 2:4 already."""
    model = copy.deepcopy(austen._loaded(NAME))
    plan = make_plan(model)
    for p in [t.module.weight for t in plan.targets] + [e.module.get_parameter(n) for e in plan.experts for n in e.spec.parameters[:2]]:
        p.data = p.data * sparse24.magnitude_mask(p.data)
    return model


@functools.cache
def before() -> float:
    return austen.nats_per_byte(pruned_in_float32(), WINDOWS)


@functools.cache
def dense_cost() -> float:
    """What dense NVFP4 costs the same weights: +0.037, five times what it costs the model before it was pruned."""
    model = pruned_in_float32()
    fp4_inductor.quantize_model(model, NVFP4Config("mse"), progress=False)
    return austen.nats_per_byte(model, WINDOWS) - before()


@pytest.mark.parametrize("path", ["container", "bfloat16", "transformers backend", "saved and loaded"])
def test_every_path_keeps_experts_that_are_sparse_already(path, tmp_path):
    """``pruning="existing"`` costs what dense NVFP4 costs the same weights, by every way their experts can run."""
    model = pruned_in_float32()
    fp4_inductor.quantize_model(model, Sparse24Config(), progress=False)
    experts = {n: m for n, m in model.named_modules() if isinstance(m, FP4Experts)}
    assert len(experts) == 4
    if path == "bfloat16":
        model = model.bfloat16()
    elif path == "saved and loaded":
        fp4_inductor.save(model, tmp_path)
        model = fp4_inductor.load(lambda: type(model)(model.config), tmp_path)
    elif path == "transformers backend":
        dense = pruned_in_float32()
        for name, module in experts.items():
            own = dense.get_submodule(name)
            for part in ("gate_up_proj", "down_proj"):
                setattr(own, part, torch.nn.Parameter(getattr(module, part).weight, requires_grad=False))
            model.set_submodule(name, own)
        assert use_experts_backend(model)
    cost = austen.nats_per_byte(model, WINDOWS) - before()
    austen._show(cost=cost)
    assert cost == pytest.approx(dense_cost(), abs=0.012 if path == "bfloat16" else 1e-4)


def test_a_wrong_expert_shows():
    model = pruned_in_float32()
    fp4_inductor.quantize_model(model, Sparse24Config(), progress=False)
    for m in model.modules():
        if isinstance(m, FP4Experts):
            for w in (m.gate_up_proj, m.down_proj):
                for t in (w.values, w.meta, w.scale.view(torch.uint8), w.global_scale):
                    t.copy_(t.roll(1, 0))
    assert austen.nats_per_byte(model, WINDOWS) - before() > 1.0
