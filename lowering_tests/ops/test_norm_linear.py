"""The ops with an RMSNorm in front of a linear layer: numbers, where the norm is rounded, errors, gradients. test_contracts.py has what holds for every op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor.errors import DTypeError, ShapeError, UnsupportedOpError
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.ops.norm_linear import rms_norm, rms_norm_reference

OPS = ["norm_linear", "norm_linear_epilogue", "norm_linear_glu", "norm_linear_siblings"]
fp4 = torch.ops.fp4


@pytest.mark.parametrize("name", OPS)
def test_within_tolerance_of_the_reference(name):
    contract, worst = CONTRACTS[name], 0.0
    for description, args in contract.inputs(torch.device("cpu")):
        for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (contract.op(*args), contract.reference(*args))), strict=True):
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
            assert error <= contract.tolerance[b.dtype], (description, error)
            worst = max(worst, error)
    assert worst > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_is_float32_rounded_once(dtype, offset):
    x, w = (torch.randn(7, 96) * 9).to(dtype), torch.randn(96).to(dtype)
    want = F.rms_norm(x.double(), (96,), offset + w.double(), 1e-5)
    got = rms_norm(x, w, 1e-5, offset)
    assert got.dtype == dtype
    ulp = torch.finfo(dtype).eps
    assert bool(((got.double() - want).abs() <= want.abs() * ulp * (0.51 if dtype != torch.float32 else 4) + 1e-7).all())
    assert torch.equal(rms_norm_reference(x, w, 1e-5, offset), want.to(dtype))


def test_the_product_reads_the_rounded_row():
    """As the model's own code does: a kernel that multiplied by the float32 row would differ."""
    x, w = torch.randn(1, 64).bfloat16(), torch.randn(64).bfloat16()
    q = nvfp4.quantize(torch.eye(64))
    assert torch.equal(fp4.norm_linear(x, w, 1e-5, 0.0, *q), fp4.linear(rms_norm(x, w, 1e-5, 0.0), *q))
    assert torch.equal(CONTRACTS["norm_linear"].reference(x, w, 1e-5, 0.0, *q), CONTRACTS["linear"].reference(rms_norm_reference(x, w, 1e-5, 0.0), *q))


@pytest.mark.parametrize("name", OPS)
def test_a_norm_that_does_not_fit(name):
    contract = CONTRACTS[name]
    _, (x, w, *rest) = next(case for case in contract.inputs(torch.device("cpu")) if case[1][0].dim() == 2)
    for device in ("cpu", "meta"):
        args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in (x, *rest)]
        for wrong in (w[1:], w[None], w.sum()):
            with pytest.raises(ShapeError, match=f"fp4.{name}: the norm's weight does not fit"):
                contract.op(args[0], wrong.to(device), *args[1:])
        with pytest.raises(DTypeError, match="norm_weight dtype"):
            contract.op(args[0], w.to(device, torch.float64), *args[1:])


@pytest.mark.parametrize("name", OPS)
def test_no_gradient(name):
    contract = CONTRACTS[name]
    _, (x, w, *rest) = next(iter(contract.inputs(torch.device("cpu"))))
    for which in (0, 1):
        given = [t.clone().requires_grad_() if i == which else t for i, t in enumerate((x, w))]
        with pytest.raises(UnsupportedOpError, match=f"fp4.{name} has no gradient for {('x', 'norm_weight')[which]}"):
            contract.op(*given, *rest)
