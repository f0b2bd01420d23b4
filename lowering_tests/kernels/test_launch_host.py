"""The host side of fp4.linear on CUDA, without a GPU: fake tensors on a pretended device, launchers replaced by a spy."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import host
from fp4_inductor.kernels.linear import launch
from fp4_inductor.kernels.router import launch as router_launch
from fp4_inductor.kernels.sparse_linear import launch as sparse_launch
from lowering_tests.fake_cuda import pretend_cuda


@pytest.fixture
def fake_gpu():
    host.forget_plans()
    with pretend_cuda(), FakeTensorMode(), mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()):
        yield
    host.forget_plans()


def parts(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(n, k // 2, dtype=torch.uint8, device="cuda"),
        torch.empty(n, k // nvfp4.GROUP, dtype=nvfp4.SCALE_DTYPE, device="cuda"),
        torch.empty((), device="cuda"),
    )


@pytest.mark.parametrize(("lead", "n", "k"), [((0,), 5, 16), ((3,), 0, 16), ((2, 0, 4), 5, 32), ((), 5, 0), ((3,), 5, 0), ((0,), 0, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_empty_dimensions_launch_nothing(fake_gpu, lead, n, k, with_bias):
    launched = mock.Mock(side_effect=AssertionError("launched"))
    bias = torch.empty(n, device="cuda") if with_bias else None
    with mock.patch.dict(launch._LAUNCHERS, dict.fromkeys(launch._LAUNCHERS, launched)):
        y = launch.linear(torch.empty(*lead, k, device="cuda"), *parts(n, k), bias)
    assert (tuple(y.shape), y.dtype, y.device.type) == ((*lead, n), torch.float32, "cuda")


@pytest.mark.parametrize(
    "make", [lambda t: t[::2], lambda t: t[1:], lambda t: t[3:][::3], lambda t: t.view(8, 8).t()], ids=["strided", "offset", "both", "transposed"]
)
def test_what_a_kernel_reads_is_dense_and_aligned(make):
    t = make(torch.arange(64, dtype=torch.bfloat16))
    ready = host.aligned(t)
    assert ready.is_contiguous()
    assert ready.data_ptr() % 16 == 0
    assert torch.equal(ready, t)
    assert host.aligned(ready).data_ptr() == ready.data_ptr(), "no copy where none is needed"


@pytest.mark.parametrize("t", [4, 20])
def test_a_routers_kernels_read_dense_operands(t):
    wide = torch.randn(t, 81).bfloat16(), torch.randn(12, 81).bfloat16(), torch.randn(25).bfloat16()
    x, weight, bias = (part[..., 1::2] for part in wide)
    calls = {}

    def spy(name):
        return mock.MagicMock(**{"__getitem__.return_value": lambda *args, **constants: calls.update({name: args})})

    with (
        mock.patch.multiple(router_launch, router_scores=spy("scores"), router_choice=spy("choice")),
        mock.patch.object(host, "arch", return_value=90),
        mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()),
    ):
        weights, ids = router_launch.router(x, weight, bias, 2, "softmax", torch.float32)
    assert (weights.shape, weights.dtype, ids.dtype) == ((t, 2), torch.float32, torch.int64)
    if t > router_launch.MOST_TOKENS:
        assert torch.equal(calls["choice"][0], torch.nn.functional.linear(x.contiguous(), weight.contiguous(), bias.contiguous())) and "scores" not in calls
    else:
        for given, want in zip(calls["scores"], (x, weight, bias), strict=False):
            assert given.is_contiguous() and torch.equal(given, want)


@pytest.mark.parametrize("lead", [(0,), (2, 0), ()])
def test_an_empty_sparse_weight_launches_nothing(fake_gpu, lead):
    launched = mock.Mock(side_effect=AssertionError("launched"))
    n, k = (5, 32) if 0 in lead else (0, 32)
    _, scale, g = parts(n, k)
    weight = torch.empty(n, k // 4, dtype=torch.uint8, device="cuda"), torch.empty(n, k // 8, dtype=torch.uint8, device="cuda"), scale, g
    with mock.patch.dict(sparse_launch.LAUNCHERS, dict.fromkeys(sparse_launch.LAUNCHERS, launched)):
        assert tuple(sparse_launch.sparse_linear(torch.empty(*lead, k, device="cuda"), *weight).shape) == (*lead, n)


@pytest.mark.parametrize("kind", ["gemv", "mid"])
def test_a_sparse_launcher_gives_its_kernel_every_argument_and_no_other(kind):
    """A constant that the kernel does not take would be an error on a GPU only."""
    kernel = getattr(sparse_launch, f"sparse_{kind}")
    spy = mock.MagicMock()
    _, scale, g = nvfp4.quantize(torch.randn(40, 96))
    weight = torch.empty(40, 24, dtype=torch.uint8), torch.empty(40, 12, dtype=torch.uint8), scale, g
    with mock.patch.object(sparse_launch, f"sparse_{kind}", spy):
        getattr(sparse_launch, kind)(torch.randn(3, 96).half(), *weight)
    positional, keywords = spy.__getitem__.return_value.call_args
    given = [*kernel.arg_names[: len(positional)], *keywords]
    assert sorted(given) == sorted([*kernel.arg_names, "num_warps", "num_stages"])
