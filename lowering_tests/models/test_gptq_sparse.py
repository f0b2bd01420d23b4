"""scale_search="gptq" of 2:4-sparse weights: which Hessian prunes and rounds, what becomes of dense layers beside them, who falls back."""

from __future__ import annotations

import copy

import pytest
import torch

import fp4_inductor
from fp4_inductor import Sparse24Config, quantize_model
from fp4_inductor.formats import gptq as definition
from fp4_inductor.formats import pruning, sparse24
from fp4_inductor.kernels.quantize import gptq as rounding
from fp4_inductor.models import prune, token_weights
from fp4_inductor.models.chain import Chain
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.walk import walk
from fp4_inductor.modules import Sparse24Linear

pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")
NOTE = 'scale_search="gptq" over the calibration batches, tokens weighted by the Fisher information of the model'


def batches(count: int = 3) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 128, (8, 32), generator=generator), "use_cache": False} for _ in range(count)]


def moments_of(model, name: str, data: list) -> torch.Tensor:
    """The weighted Hessian of one layer of the dense model."""
    plan = make_plan(model)
    chain = Chain([], broken="on purpose")
    weights = token_weights.fisher(model, plan.targets, data, chain, False, plan.experts)
    group = next(g for g in plan.groups if g[0].name == name)
    ((_, _, moments),) = walk(model, chain, [group], data, sequential=False, progress=False, desc="", weigh=weights)
    return moments.mean()


def dense(parts) -> torch.Tensor:
    return sparse24.dequantize_sparse24(*parts, torch.float32)


@pytest.mark.parametrize("method", ["existing", "magnitude", "wanda"])
def test_what_is_kept_is_rounded_by_the_weighted_hessian(tiny, method):
    model = tiny("llama", torch.float32)
    if method == "existing":
        for t in make_plan(model).targets:
            t.module.weight.data.mul_(sparse24.magnitude_mask(t.module.weight.data))
    data = batches()
    config = Sparse24Config(method, "gptq", calibration=data, accept_loss=method == "magnitude")
    done = quantize_model(copy.deepcopy(model), config, progress=False)
    name = "model.layers.1.mlp.down_proj"
    layer, w, h = done.get_submodule(name), model.get_submodule(name).weight.detach(), moments_of(model, name, data)
    assert isinstance(layer, Sparse24Linear)
    start = pruning.wanda(w, h) if method == "wanda" else sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w), "activation", None, h.diagonal())
    want = dense(rounding.quantize_sparse24(w, h, start))
    assert float((layer.dequantize(torch.float32) != want).float().mean()) < 0.02  # sums in another order may tip a tie
    assert NOTE in fp4_inductor.report(done).notes
    # Not what tokens that are all alike give.
    plain = quantize_model(copy.deepcopy(model), Sparse24Config(method, calibration=data, accept_loss=method == "magnitude"), progress=False)
    errors = [float(definition.objective(w, m.get_submodule(name).dequantize(torch.float32), h).sum()) for m in (done, plain)]
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_pruned_block_by_block_beside_dense_layers(tiny, kind, monkeypatch):
    monkeypatch.setattr(prune, "ENOUGH", 100)
    model = tiny(kind, torch.bfloat16)
    config = Sparse24Config("sparsegpt", "gptq", calibration=batches(4), bits=4.0)
    first, second = (quantize_model(copy.deepcopy(model), config, progress=False) for _ in range(2))
    report = fp4_inductor.report(first)
    assert {row.format for row in report.layers} == {"nvfp4", "sparse24_nvfp4"}
    assert report.bits_per_weight <= 4.0
    assert NOTE in report.notes and "scale_search=gptq" in report.config
    a, b = first.state_dict(), second.state_dict()
    assert all(torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a)


def test_layers_with_few_tokens_get_the_sweep_and_it_is_said(tiny):
    model = tiny("llama", torch.float32)
    data = [b["input_ids"][:1] for b in batches(4)]
    options = {"calibration": data, "accept_loss": True}
    done = quantize_model(copy.deepcopy(model), Sparse24Config("magnitude", "gptq", **options), progress=False)
    sweep = quantize_model(copy.deepcopy(model), Sparse24Config("magnitude", "activation", **options), progress=False)
    a, b = done.state_dict(), sweep.state_dict()
    assert all(torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a)
    assert all('met 96 tokens, fewer than 256: "activation"' in row.notes for row in fp4_inductor.report(done).layers)
