"""Sparse24Config with bad input: a typed error, and not a bit of the model changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4_inductor import FP4Linear, Sparse24Config, errors, quantize_model

DATA = ("wanda", "sparsegpt", "admm")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = Net().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    yield net
    assert not any(isinstance(m, FP4Linear) for m in net.modules())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


def _refused(model, kind, match, **fields):
    with pytest.raises(kind, match=match):
        quantize_model(model, Sparse24Config(**fields), progress=False)


def x(rows=256):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))


def test_existing_on_a_dense_model_names_the_layers(model):
    with pytest.raises(errors.SparsityError) as caught:
        quantize_model(model, Sparse24Config(), progress=False)
    for name in ("blocks.0-2: [64, 64]", "3 of 3 layers", "nothing was changed", "layers=["):
        assert name in str(caught.value)


def test_existing_names_only_those_that_are_dense():
    net = Net()
    net.blocks[1].weight.data.view(-1, 4)[:, ::2] = 0
    with pytest.raises(errors.SparsityError, match="2 of 3 layers") as caught:
        quantize_model(net, Sparse24Config(), progress=False)
    assert "blocks.1" not in str(caught.value)
    assert not any(isinstance(m, FP4Linear) for m in net.modules())


@pytest.mark.parametrize("pruning", DATA)
def test_calibration_with_nan(model, pruning):
    bad = x()
    bad[17, 5] = torch.nan
    _refused(model, errors.NonFiniteError, "blocks.0 holds NaN", pruning=pruning, calibration=[x(), bad])
    bad[17, 5] = torch.inf
    _refused(model, errors.NonFiniteError, "blocks.0 holds NaN", pruning=pruning, calibration=[bad])


@pytest.mark.parametrize("pruning", [*DATA, "existing"])
def test_calibration_that_is_empty(model, pruning):
    if pruning == "existing":
        pruning = "magnitude"
    _refused(model, errors.CalibrationError, "no batch", pruning=pruning, calibration=[], accept_loss=True)
    _refused(model, errors.CalibrationError, "no batch", pruning=pruning, calibration=iter(()), accept_loss=True)


@pytest.mark.parametrize("pruning", DATA)
def test_calibration_that_is_too_short(model, pruning):
    _refused(model, errors.CalibrationError, "too short.*nothing was changed; got 40 rows", pruning=pruning, calibration=[x(40)])


@pytest.mark.parametrize("pruning", DATA)
def test_calibration_of_a_wrong_kind(model, pruning):
    _refused(model, errors.CalibrationError, "iterable of batches", pruning=pruning, calibration=x())
    _refused(model, errors.CalibrationError, "forward failed on calibration batch 1", pruning=pruning, calibration=[x(), x()[:, :32]])
    _refused(model, errors.CalibrationError, "unknown kind", pruning=pruning, calibration=["text"])


@pytest.mark.parametrize("pruning", DATA)
def test_a_weight_with_nan(pruning):
    net = Net()
    net.blocks[2].weight.data[3, 3] = torch.nan
    _refused(net, errors.NonFiniteError, "blocks.2.weight", pruning=pruning, calibration=[x()])
    assert not any(isinstance(m, FP4Linear) for m in net.modules())


@pytest.mark.parametrize("layers", [["blocks.7"], [], ["blocks.0", "nothing"]])
def test_layers_that_are_not_there(model, layers):
    _refused(model, errors.ConfigError, "layers names what is not there", pruning="magnitude", accept_loss=True, layers=layers)


def test_layers_of_a_wrong_kind(model):
    _refused(model, errors.ConfigError, "layers is a list of names", layers="blocks.0")
    _refused(model, errors.ConfigError, "layers holds an invalid regular expression", layers=["re:("])


def test_max_kl_without_logits(model):
    _refused(model, errors.ConfigError, "max_kl needs a model with logits", pruning="wanda", calibration=[x()], max_kl=0.1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pruning": "random"}, "pruning is not a known choice"),
        ({"scale_search": "best"}, "scale_search is not a known choice"),
        ({"prefill": "int8"}, "prefill is not a known choice"),
        ({"pruning": "wanda"}, "pruning='wanda' needs calibration data"),
        ({"scale_search": "activation"}, "scale_search='activation' needs calibration data"),
        ({"max_kl": 0.1}, "max_kl=0.1 needs calibration data"),
        ({"pruning": "magnitude"}, "ruins most dense models.*accept_loss=True"),
        ({"bits": 4.0, "max_error": 0.1}, "more than one budget"),
        ({"bits": 3.0}, "bits is out of range"),
        ({"bits": 5}, "bits is out of range"),
        ({"max_error": -1.0}, "max_error is out of range"),
        ({"max_error": float("nan")}, "max_error is out of range"),
        ({"max_error": "0.1"}, "max_error is out of range"),
        ({"bits": True}, "bits is out of range"),
    ],
)
def test_configurations(fields, match):
    with pytest.raises(errors.ConfigError, match=match):
        Sparse24Config(**fields)


def test_an_unknown_field():
    with pytest.raises(TypeError):
        Sparse24Config(sparsity=0.5)
