"""fp4.sparse_linear on a GPU: numbers in every regime, pattern and dtype, awkward memory, CUDA graphs, compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fp4_inductor import Sparse24Linear, dispatch
from fp4_inductor.config import dispatch_config
from fp4_inductor.formats import sparse24
from fp4_inductor.kernels.select import describe, plan
from fp4_inductor.ops import sparse_linear as contract
from lowering_tests.gpu.helpers import BF16, DEVICE, FP8_BOUND, FP16, FP32, error
from lowering_tests.gpu.helpers import sparse_weight as weight

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4


def exact(x, parts, bias=None):
    y = x.double() @ sparse24.dequantize_sparse24(*parts, torch.float32).double().mT
    return y if bias is None else y + bias.double()


def bound(x, parts, fused=False) -> float:
    n, k = sparse24.STORAGE.logical(parts.values.shape)
    m = x.shape[:-1].numel()
    if plan(describe("sparse_linear", x.device, x.dtype, n, k), dispatch_config()).pick(m).regime in ("large_fp8", "wide_fp8"):
        return FP8_BOUND
    return contract.CONTRACT.tolerance[x.dtype] * (2 if m * n < 32 else 1) * (2 if fused else 1) + 6e-8 * k**0.5


def rows(parts, dtype=BF16) -> list[int]:
    """The first and the last M of every regime."""
    n, k = sparse24.STORAGE.logical(parts.values.shape)
    found = plan(describe("sparse_linear", torch.device(DEVICE), dtype, n, k), dispatch_config())
    return sorted({m for b in (0, *found.bounds) for m in (b, b + 1) if m})


def test_every_m():
    parts, bias = weight(512, 1024), torch.randn(512, device=DEVICE).to(BF16)
    for m in (*range(66), 100, 257, 1000, 4096):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        y = fp4.sparse_linear(x, *parts, bias)
        assert y.shape == (m, 512)
        assert not m or error(y, exact(x, parts, bias)) <= bound(x, parts, fused=True), m


@pytest.mark.parametrize("shape", [(33, 96), (4095, 1056), (1, 64), (130, 32), (520, 2080)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_tails(shape, dtype):
    parts = weight(*shape)
    for m in (1, 2, 17, 65, 300):
        x = torch.randn(m, shape[1], device=DEVICE).to(dtype)
        assert error(fp4.sparse_linear(x, *parts), exact(x, parts)) <= bound(x, parts), m


@pytest.mark.parametrize("pattern", range(6))
def test_each_pattern_alone(pattern):
    """Activations tell the four positions of a group apart."""
    parts = weight(256, 512, pattern)
    for m in rows(parts):
        x = (torch.randn(m, 512, device=DEVICE) * 4.0 ** (torch.arange(512, device=DEVICE) % 4)).to(BF16)
        assert error(fp4.sparse_linear(x, *parts), exact(x, parts)) <= bound(x, parts), m


def test_every_regime_without_its_neighbours():
    parts = weight(256, 512)
    for thresholds in ({"gemv": 0}, {"small": 0}, {"gemv": 0, "mid": 0}, {"mid": 3000}, {"small": 0, "mid": 0, "gemv": 100}):
        with dispatch(thresholds=thresholds):
            for m in (1, 2, 7, 40, 100):
                x = torch.randn(m, 512, device=DEVICE).to(BF16)
                assert error(fp4.sparse_linear(x, *parts), exact(x, parts)) <= bound(x, parts), (m, thresholds)


def test_awkward_memory_gives_the_same_bits():
    parts = weight(256, 512)
    for m in rows(parts):
        x = torch.randn(m, 512, device=DEVICE).to(BF16)
        want = fp4.sparse_linear(x, *parts)
        wide = torch.randn(m, 1200, device=DEVICE).to(BF16)
        wide[:, 3:515] = x
        memory = torch.empty(parts.meta.numel() + 1, dtype=torch.uint8, device=DEVICE)
        memory[1:] = parts.meta.flatten()
        tall = torch.zeros(512, 128, dtype=torch.uint8, device=DEVICE)
        tall[::2] = parts.values
        assert torch.equal(fp4.sparse_linear(wide[:, 3:515], *parts), want)
        assert torch.equal(fp4.sparse_linear(x, parts.values, memory[1:].view(parts.meta.shape), *parts[2:]), want)
        assert torch.equal(fp4.sparse_linear(x, tall[::2], *parts[1:]), want)
        assert all(torch.equal(fp4.sparse_linear(x, *parts), want) for _ in range(20))


def test_huge_tiny_and_non_finite_activations():
    parts = weight(250, 544)
    kept = sparse24.mask_of(parts.meta)[:, -1]
    for m in rows(parts):
        for size in (1e30, 1e-30):
            x = (torch.randn(m, 544, device=DEVICE) * size).to(BF16)
            assert error(fp4.sparse_linear(x, *parts), exact(x, parts)) <= bound(x, parts), (m, size)
        assert not fp4.sparse_linear(torch.zeros_like(x), *parts).any()
        if m > 1:
            x = torch.randn(m, 544, device=DEVICE).to(BF16)
            clean = fp4.sparse_linear(x, *parts)
            x[1, -1] = float("nan")
            y = fp4.sparse_linear(x, *parts)
            others = [i for i in range(m) if i != 1]
            assert torch.equal(y[others], clean[others])
            assert y[1, kept].isnan().all()


def test_cuda_graph_replays_are_eager_bits():
    parts = weight(512, 1024)
    for m in rows(parts):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        eager = fp4.sparse_linear(x, *parts)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fp4.sparse_linear(x, *parts)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fp4.sparse_linear(x, *parts)
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, eager), m


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_with_epilogues(mode):
    w = torch.randn(1024, 512, device=DEVICE).to(BF16) / 512**0.5
    layer = Sparse24Linear.from_weight(w, torch.randn(1024, device=DEVICE).to(BF16), mask=sparse24.magnitude_mask(w))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, r):
            return F.silu(self.layer(x)) + r

    block = Block()
    compiled = torch.compile(block, mode=mode, fullgraph=True)
    with torch.no_grad():
        for m in (1, 2, 3, 40, 64, 65, 300, 1):
            x, r = torch.randn(m, 512, device=DEVICE).to(BF16), torch.randn(m, 1024, device=DEVICE).to(BF16)
            want = F.silu(exact(x, layer.parts(), layer.bias)) + r.double()
            assert error(compiled(x, r).clone(), want) <= bound(x, sparse24.Sparse24Parts(*layer.parts()), fused=True), m


def test_more_than_two_gigabytes_of_dense_values():
    n, k = 65536 + 8, 32768
    parts = weight(n, k)
    for m in (1, 40):
        x = torch.randn(m, k, device=DEVICE).to(FP16)
        y = fp4.sparse_linear(x, *parts)
        tail = sparse24.Sparse24Parts(*(t[-64:] for t in parts[:3]), parts.global_scale)
        assert n * k > 2**31
        assert error(y[:, -64:], exact(x, tail)) <= bound(x, parts), m
    last = fp4.sparse_dequantize(*parts, BF16)[-8:]
    assert torch.equal(last, sparse24.dequantize_sparse24(*(t[-8:] for t in parts[:3]), parts.global_scale, BF16))
