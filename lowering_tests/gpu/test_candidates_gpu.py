"""Kernels that are off by default, or were until they were timed, on a GPU: numbers, tails, replays, what the emulator cannot see (the real memory model)."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import dispatch
from fp4_inductor.kernels import csrc, host
from fp4_inductor.kernels.linear import configs, launch
from fp4_inductor.kernels.sparse_linear import cuda_small
from fp4_inductor.ops import linear_glu
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, bound_of, error, exact, plan_of, weight
from lowering_tests.kernels import sparse24 as sparse
from lowering_tests.kernels.emulator import tiles_of

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
    source = "gemm/linear_wide.cu"
    streamed = [configs.CudaWideConfig(*t, 1, 0) for t in tiles_of(source, "STREAMED")]
    for n, k in ((512, 1024), (4096, 4096), (8200, 2048), (33, 2112), (130, 64)):
        split = [configs.CudaWideConfig(*t, s) for t in tiles_of(source, "ANY_K" if k % 256 else "TILE") for s in (1, 2, 4) if s <= -(-k // 256)]
        tiles = [None, *split, *(streamed if k % 256 == 0 else ())]
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 64, 130, 300):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            for tile in tiles:
                first = launch.wide(x, *w, bias, tile)
                assert error(first, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), (m, n, k, tile)
                assert all(torch.equal(launch.wide(x, *w, bias, tile), first) for _ in range(20)), (m, n, k, tile)


def test_candidates_serve_when_switched_on():
    hopper()
    with dispatch(candidates=("cuda_mid",)):
        for n, k in ((512, 1024), (130, 1040)):
            w = weight(n, k)
            small = "cuda_small_any_k" if k % 64 else "cuda_small"
            for m, kernel in ((2, small), (32, small), (33, "cuda_mid"), (128, "cuda_mid")):
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
def test_early(dtype):
    """A chain of calls, each the input of the next, in one graph: what began too early would read the activations of the replay before."""
    hopper()
    n = 4096
    weights = [weight(n, n) for _ in range(6)]
    for m in (1, 8, 16, 32):
        x = torch.randn(m, n, device=DEVICE).to(dtype)

        def chain(launcher, x=x):
            y = x
            for w in weights:
                y = launcher(y, *w) * 1.0
                y = launcher(y, *w)
            return y

        chain(launch.small_early)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(launch.small_early)
        for _ in range(50):
            x.copy_(torch.randn(m, n, device=DEVICE))
            graph.replay()
            want = chain(launch.small)
            # linear_small has another tile for 17 to 32 rows and a long K when it begins early; here it has the same
            assert torch.equal(got, want), m


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_siblings_and_epilogues(dtype):
    """Two and three global scales, a hundred times apart; activation, product and residual; act(gate) * up."""
    hopper()
    for n, k in ((512, 1024), (66, 2112), (8192, 4096)):
        q, s, g = weight(n, k)
        a, b = n // 4, n // 2
        scales = torch.stack((g, g * 100, g / 100))
        for size, rows in (("small", (1, 8, 9, 32)), ("mid", (17, 64, 130)), ("wide", (33, 64, 130, 300))):
            for m in rows:
                x, bias = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
                y = csrc.call(f"linear_{size}", x, (q, s), scales, bias, 90, then=configs.Epilogue((a, b)))
                for first, last, i in ((0, a, 0), (a, b, 1), (b, n, 2)):
                    want = exact(x, q[first:last], s[first:last], scales[i], bias[first:last])
                    assert error(y[:, first:last], want) <= bound_of(x, q, fused=True), (size, m, n, k, i)
                z = exact(x, q, s, g, bias)
                mul, residual = (torch.randn(m, n, device=DEVICE).to(dtype) for _ in range(2))
                for act, f in (("", lambda t: t), *linear_glu.ACTIVATIONS.items()):
                    then = configs.Epilogue((), act, mul, residual)
                    y = csrc.call(f"linear_{size}_pointwise", x, (q, s), g, bias, 90, then=then)
                    assert error(y, f(z) * mul.double() + residual.double()) <= bound_of(x, q, fused=True), (size, m, n, k, act)
                    if act:
                        y = csrc.call(f"linear_{size}_glu", x, (q, s), g, bias, 90, then=configs.Epilogue((), act))
                        assert error(y, f(z[:, : n // 2]) * z[:, n // 2 :]) <= bound_of(x, q, fused=True), (size, m, n, k, act)
                        again = csrc.call(f"linear_{size}_glu", x, (q, s), g, bias, 90, then=configs.Epilogue((), act))
                        assert torch.equal(again, y)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sparse(dtype):
    arch = host.arch(torch.device(DEVICE, 0))
    if csrc.why_not("sparse_linear_small", arch):
        pytest.skip("needs nvcc")
    tiles = [None, *(cuda_small.SparseSmallConfig(*t, s) for t in ((2, 8, 2), (2, 16, 2), (4, 8, 3)) if arch == 90 for s in (1, 2, 4, 8))]
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 64), (70, 1056)):
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
