"""scale_search="activation": the statistics, the batches, and everything that may be wrong with them."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, errors, quantize_model
from fp4_inductor.models.calibrate import statistics
from fp4_inductor.models.plan import make_plan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 64)
        self.b = nn.Linear(64, 32)
        self.rare = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0, rare=False):
        h = torch.relu(self.a(x * scale))
        y = self.b(self.dropout(h))
        return self.rare(y) if rare else y


def _stats(model, batches, strict=True):
    return {name: mean.result() for name, mean in statistics(model, make_plan(model).targets, batches, strict=strict).items()}


def test_mean_squares_are_exact_and_streaming():
    model = Net()
    model.dropout.p = 0.0
    parts = [torch.randn(n, 5, 32, dtype=torch.float64).float() for n in (1, 4, 7)]
    x = torch.cat([p.reshape(-1, 32) for p in parts])
    found = _stats(model, [(p,) for p in parts], strict=False)
    torch.testing.assert_close(found["a"].double(), x.double().square().mean(0), rtol=1e-6, atol=0)
    h = torch.relu(model.a(x)).detach()
    torch.testing.assert_close(found["b"].double(), h.double().square().mean(0), rtol=1e-5, atol=1e-12)
    assert found["rare"] is None


def test_every_kind_of_batch_and_eval_mode():
    torch.manual_seed(1)
    x = torch.randn(6, 32)
    reference = None
    for batch in (x, (x,), [x], {"x": x}, UserDict(x=x), {"x": x, "scale": 1.0}):
        model = Net()
        model.load_state_dict(_weights())
        found = _stats(model, [batch], strict=False)["b"]  # dropout off: the same for every call
        reference = found if reference is None else reference
        assert torch.equal(found, reference)


def _weights():
    torch.manual_seed(2)
    return Net().state_dict()


def test_the_model_is_left_as_it_was():
    model = Net().train()
    model.a.eval()
    quantize_model(model, NVFP4Config("activation", calibration=[{"x": torch.randn(4, 32), "rare": True}]), progress=False)
    assert model.training
    assert model.dropout.training
    assert not model.a.training
    assert model.b.training
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


def test_the_weights_are_used_and_help():
    torch.manual_seed(3)
    weight = torch.randn(256, 256)
    x = torch.randn(2048, 256) * torch.logspace(-2, 1, 256)[torch.randperm(256)]  # a few channels of each block dominate
    errors_ = {}
    for search in ("mse", "activation"):
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        model[0].weight.data.copy_(weight)
        quantize_model(model, NVFP4Config(search, calibration=[x] if search == "activation" else None), progress=False)
        errors_[search] = (model(x) - x @ weight.T).norm().item()
    assert errors_["activation"] < 0.85 * errors_["mse"]
    layer = FP4Linear.from_weight(weight, scale_search="activation", channel_weight=x.double().square().mean(0).float())
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    model[0].weight.data.copy_(weight)
    quantize_model(model, NVFP4Config("activation", calibration=[x]), progress=False)
    differing = (model[0].qdata != layer.qdata).float().mean()
    assert differing < 1e-3  # the same statistics up to the order of summation


def test_k_that_needs_padding():
    model = nn.Sequential(nn.Linear(30, 8))
    quantize_model(model, NVFP4Config("activation", calibration=[torch.randn(9, 30)]), progress=False)
    assert model(torch.randn(2, 30)).isfinite().all()


def test_a_shared_weight_sees_all_its_inputs():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    quantize_model(model, NVFP4Config("activation", calibration=[torch.randn(16, 32)]), progress=False)
    assert model[0].qdata is model[2].qdata


@pytest.mark.parametrize("empty", [[], (), iter([]), (b for b in [])])
def test_no_batches(empty):
    model = Net()
    with pytest.raises(errors.CalibrationError, match="no batch"):
        quantize_model(model, NVFP4Config("activation", calibration=empty), progress=False)
    assert isinstance(model.a, nn.Linear)


def test_an_exhausted_generator_is_named():
    batches = iter([{"x": torch.randn(4, 32), "rare": True}])
    config = NVFP4Config("activation", calibration=batches)
    quantize_model(Net(), config, progress=False)
    with pytest.raises(errors.CalibrationError, match="exhausted"):
        quantize_model(Net(), config, progress=False)


@pytest.mark.parametrize("calibration", [torch.randn(4, 32), {"x": torch.randn(4, 32)}, "text", 3])
def test_a_single_batch_instead_of_a_list(calibration):
    with pytest.raises(errors.CalibrationError, match="iterable of batches"):
        quantize_model(Net(), NVFP4Config("activation", calibration=calibration), progress=False)


@pytest.mark.parametrize("batch", [3, "text", None])
def test_a_batch_of_an_unknown_kind(batch):
    with pytest.raises(errors.CalibrationError, match="batch 0"):
        quantize_model(Net(), NVFP4Config("activation", calibration=[batch]), progress=False)


def test_a_failing_forward_is_named_and_cleaned_up():
    model = Net()
    with pytest.raises(errors.CalibrationError, match=r"batch 1.*RuntimeError"):
        quantize_model(model, NVFP4Config("activation", calibration=[torch.randn(4, 32), torch.randn(4, 31)]), progress=False)
    assert isinstance(model.a, nn.Linear)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_activations_name_the_first_layer(value):
    x = torch.randn(4, 32)
    x[1, 3] = value
    model = Net()
    with pytest.raises(errors.NonFiniteError, match="input of a holds"):
        quantize_model(model, NVFP4Config("activation", calibration=[x]), progress=False)
    assert isinstance(model.a, nn.Linear)


def test_a_layer_that_is_never_reached():
    model = Net()
    config = NVFP4Config("activation", calibration=[torch.randn(4, 32)])
    with pytest.raises(errors.CalibrationError, match="rare"):
        quantize_model(model, config, progress=False)
    assert isinstance(model.a, nn.Linear)
    quantize_model(model, config, strict=False, progress=False)
    notes = {i.name: i.notes for i in fp4_inductor.report(model).layers}
    assert notes["rare"] == ("not reached by calibration: unweighted scales",)
    assert notes["a"] == ()
