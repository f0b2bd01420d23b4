"""Kernels that are off by default, on a GPU: numbers, tails, replays. What the emulator cannot see (the real memory model) is seen here."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import dispatch
from fp4_inductor.kernels import csrc, host
from fp4_inductor.kernels.linear import configs, launch
from fp4_inductor.kernels.sparse_linear import cuda_small
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, bound_of, error, exact, plan_of, weight
from lowering_tests.kernels import sparse24 as sparse

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0) or csrc.why_not("linear_mid", 90):
        pytest.skip("the rows of candidates name sm_90 with nvcc")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_mid(dtype):
    hopper()
    tiles = [None, *(configs.CudaMidConfig(*t, s) for t in ((2, 16, 4, 3), (2, 32, 4, 3), (4, 32, 4, 2), (2, 64, 2, 4), (1, 64, 2, 4)) for s in (1, 2, 4, 8))]
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 80)):
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 33, 64, 130):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            for tile in tiles:
                first = launch.middle(x, *w, bias, tile)
                assert error(first, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), (m, n, k, tile)
                assert all(torch.equal(launch.middle(x, *w, bias, tile), first) for _ in range(20)), (m, n, k, tile)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_wide(dtype):
    hopper()
    tiles = [None, *(configs.CudaWideConfig(*t, s) for t in ((64, 2, 4), (128, 1, 4), (256, 1, 4)) for s in (1, 2, 4, 8))]
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 64)):
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 64, 130, 300):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            for tile in tiles:
                first = launch.wide(x, *w, bias, tile)
                assert error(first, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), (m, n, k, tile)
                assert all(torch.equal(launch.wide(x, *w, bias, tile), first) for _ in range(20)), (m, n, k, tile)


def test_candidates_serve_when_switched_on():
    hopper()
    with dispatch(candidates=("cuda_mid", "cuda_small_any_k")):
        for n, k in ((512, 1024), (130, 1040)):
            w = weight(n, k)
            for m, kernel in ((2, "cuda_small_any_k"), (32, "cuda_small_any_k"), (33, "cuda_mid"), (128, "cuda_mid")):
                x = torch.randn(m, k, device=DEVICE).to(BF16)
                assert plan_of(x, w[0]).pick(m).kernel == kernel
                y = fp4.linear(x, *w)
                assert error(y, exact(x, *w)) <= bound_of(x, w[0]), (m, n, k)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    z = fp4.linear(x, *w)
                for _ in range(100):
                    z.fill_(float("nan"))
                    graph.replay()
                assert torch.equal(z, y)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sparse(dtype):
    arch = host.arch(torch.device(DEVICE, 0))
    if csrc.why_not("sparse_linear_small", arch):
        pytest.skip("needs nvcc")
    tiles = [None, *(cuda_small.SparseSmallConfig(*t, s) for t in ((2, 8, 2), (2, 16, 2), (4, 8, 3)) if arch == 90 for s in (1, 2, 4, 8))]
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 64)):
        w = sparse.weight(n, k)
        reference = sparse.dense(*w).to(DEVICE)
        parts = [t.to(DEVICE) for t in w]
        for m in (1, 3, 8, 9, 16):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            want = x.double() @ reference.T
            for tile in tiles if m <= 8 else tiles[:1]:
                first = cuda_small.linear(x, *parts, None, arch, tile)
                assert ((first.double() - want).norm() / want.norm()).item() <= sparse.BOUND[dtype] * 2, (m, n, k, tile)
                assert all(torch.equal(cuda_small.linear(x, *parts, None, arch, tile), first) for _ in range(20)), (m, n, k, tile)
