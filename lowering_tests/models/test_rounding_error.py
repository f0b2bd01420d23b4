"""The error figure of the report: right for tiny and huge weights, and loud where an outlier makes all else zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, quantize_model
from fp4_inductor.models.rounding_error import LOUD, RoundingError, relative_error
from fp4_inductor.modules.experts import quantize_stack

SIZES = (1e-35, 1e-30, 1e-23, 1e-10, 1.0, 1e15, 1e30)


def _exact(w: torch.Tensor, q: torch.Tensor) -> float:
    w, q = w.double(), q.double()
    return float((q - w).norm() / w.norm())


@pytest.mark.parametrize("c", [True, False], ids=["C", "ATen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_error_does_not_depend_on_the_size(size, dtype, c, monkeypatch):
    if not c:
        monkeypatch.setattr("fp4_inductor.models.rounding_error.rounding_error", lambda *a: None)
    w = (torch.randn(40, 96, dtype=torch.float64) * size).to(dtype)
    layer = FP4Linear.from_weight(w)
    got = relative_error(w, layer)
    assert 0.05 < got < 0.15
    assert got == pytest.approx(_exact(w, layer.dequantize(torch.float32)), rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_error_of_experts_does_not_depend_on_the_size(size):
    from fp4_inductor.models.convert import _experts_error

    for inner, pad in ((32, (1, 0)), (40, (2, 8))):
        w = torch.randn(3, 2 * inner, 64) * size
        packed = quantize_stack(w, None, pad_rows=pad)
        assert 0.05 < _experts_error(w, packed, pad) < 0.15


def test_a_padded_and_an_empty_weight():
    w = torch.randn(8, 40)
    layer = FP4Linear.from_weight(w)
    assert relative_error(w, layer) == pytest.approx(_exact(w, layer.dequantize(torch.float32)), rel=1e-6)
    zeros = torch.zeros(8, 32)
    assert relative_error(zeros, FP4Linear.from_weight(zeros)) == 0.0


def test_an_outlier_that_makes_all_others_zero_is_an_error_near_one():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].weight.data[5, 7] = 1e9
    quantize_model(model, NVFP4Config("amax"), progress=False)
    dense = model[0].dequantize(torch.float32)
    assert (dense != 0).sum() == 1
    report = fp4_inductor.report(model)
    outlier, plain = (next(r for r in report.layers if r.name == n) for n in "01")
    assert outlier.relative_error > 0.99
    assert plain.relative_error < 0.15 < LOUD
    assert len(report.warnings) == 1
    assert "0: relative error 1.00" in report.warnings[0]
    assert "far larger" in str(report)


def test_an_outlier_among_experts_counts_too():
    from fp4_inductor.models.convert import _experts_error

    w = torch.randn(3, 64, 64)
    w[1, 5, 7] = 1e9
    assert 0.5 < _experts_error(w, quantize_stack(w, None), (1, 0)) < 0.65  # one expert of three


def test_a_pruned_block_is_not_lost():
    w = torch.randn(32, 64)
    w[:, 16:48] = 0.0
    assert relative_error(w, FP4Linear.from_weight(w)) < 0.15
    sums = RoundingError()
    sums.add(w, w.clone(), True)
    assert sums.relative() == 0.0
