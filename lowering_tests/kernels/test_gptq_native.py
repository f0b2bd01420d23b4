"""GPTQ on a CPU: the loops over columns in C against those in torch operators, bit for bit, with every instruction set that runs here."""

from __future__ import annotations

import platform

import pytest
import torch

from fp4_inductor.formats import gptq as definition
from fp4_inductor.formats import sparse24
from fp4_inductor.kernels import build
from fp4_inductor.kernels.quantize import cpu, gptq
from lowering_tests.gptq_cases import hessian, weights

FLAGS = {"generic": ("-fopenmp",)}
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS["avx2"] = ("-march=native", "-mno-avx512f", "-fopenmp")


@pytest.fixture(params=("native", *FLAGS), autouse=True)
def path(request, monkeypatch):
    if request.param != "native":
        library = gptq.opened(build.shared_library(gptq.SOURCE, (*cpu.FLAGS, *FLAGS[request.param])))
        monkeypatch.setattr(gptq, "_library", lambda: library)
    else:
        assert gptq._library() is not None
    return request.param


def equal(w: torch.Tensor, h: torch.Tensor, g=None) -> None:
    for got, want in zip(gptq.quantize(w, h, g), definition.quantize(w, h, g), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 32), (37, 48), (5, 16)])
def test_the_same_bits(shape):
    n, k = shape
    h, values = hessian(k), weights(n, k)
    for w in values.values():
        equal(w, h)
    w = values["random"]
    equal(w.bfloat16(), h)
    equal(w, h, torch.tensor(1e-3))
    equal(w, torch.zeros(k, k))
    w[0], w[:, :16] = 0, 0
    equal(w, h)


@pytest.mark.parametrize("shape", [(16, 32), (37, 160)])
def test_the_same_bits_of_sparse_weights(shape):
    n, k = shape
    h, w = hessian(k), torch.randn(shape)
    w[0] = 0
    for values, mask in ((w, sparse24.magnitude_mask(w)), (w * torch.exp(3 * torch.randn(n, k)), sparse24.magnitude_mask(torch.randn(shape)))):
        start = sparse24.quantize_sparse24(values, mask)
        for got, want in zip(gptq.quantize_sparse24(values, h, start), definition.quantize_sparse24(values, h, start), strict=True):
            assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def test_the_same_bits_across_panels(path, monkeypatch):
    monkeypatch.setattr(definition, "SWEEPS", 2)
    equal(torch.randn(17, 272), hessian(272))


def test_the_number_of_threads_changes_nothing():
    w, x = torch.randn(100, 96), torch.randn(200, 96)
    h = x.T @ x
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(definition.Panels(gptq._rounded, gptq._refined).rounded(w, torch.linalg.cholesky(h, upper=True), torch.tensor(1e-2), None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_a_compiler_the_definition_runs(monkeypatch):
    monkeypatch.setattr(gptq, "_library", lambda: None)
    w = torch.randn(4, 32)
    assert torch.equal(gptq.quantize(w, torch.eye(32))[0], definition.quantize(w, torch.eye(32))[0])
