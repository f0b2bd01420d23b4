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
    host._plan.cache_clear()
    with pretend_cuda(), FakeTensorMode(), mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()):
        yield
    host._plan.cache_clear()


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


def given(launched):
    """``(weights' rows, global scales, bounds, bias)`` of each launch."""
    found = []
    for call in launched.mock_calls:
        _, codes, *_, scales, bias = call.args
        found.append((codes.shape[0], tuple(scales.shape), call.kwargs.get("bounds", ()), None if bias is None else len(bias)))
    return found


@pytest.mark.parametrize("op", ["linear", "sparse_linear"])
def test_several_scales_are_one_launch_and_more_than_three_are_several(fake_gpu, op):
    owner, launchers = (launch, launch._LAUNCHERS) if op == "linear" else (sparse_launch, sparse_launch.LAUNCHERS)
    codes, scale, _ = parts(64, 64)
    weight = (codes, scale) if op == "linear" else (codes.new_empty(64, 16), codes.new_empty(64, 8), scale)
    launched = mock.Mock(side_effect=lambda x, *rest, **more: x.new_empty(x.shape[0], rest[0].shape[0]))
    x, bias = torch.empty(5, 64, device="cuda", dtype=torch.float16), torch.empty(64, device="cuda", dtype=torch.float16)
    with mock.patch.dict(launchers, dict.fromkeys(launchers, launched)):
        for rows, want in (
            ([0], [(64, (), (), 64)]),
            ([0, 7], [(64, (2,), (7,), 64)]),
            ([0, 32, 40], [(64, (3,), (32, 40), 64)]),
            ([0, 7, 9, 40], [(40, (3,), (7, 9), 40), (24, (), (), 24)]),
            ([0, 7, 9, 40, 50], [(40, (3,), (7, 9), 40), (24, (2,), (10,), 24)]),
        ):
            launched.reset_mock()
            y = getattr(owner, op)(x, *weight, torch.empty(len(rows), device="cuda"), bias, "auto", rows)
            assert tuple(y.shape) == (5, 64)
            assert given(launched) == want, rows


@pytest.mark.parametrize(("kind", "bounds"), [("gemv", (8,)), ("mid", (8, 24))])
def test_a_triton_kernel_is_told_where_scales_begin(kind, bounds):
    q, s, _ = nvfp4.quantize(torch.randn(40, 96))
    weight = {launch: (q, s), sparse_launch: (torch.empty(40, 24, dtype=torch.uint8), torch.empty(40, 12, dtype=torch.uint8), s)}
    for owner, name in ((launch, f"linear_{kind}"), (sparse_launch, f"sparse_{kind}")):
        spy = mock.MagicMock()
        with mock.patch.object(owner, name, spy), mock.patch.object(host, "arch", return_value=90):
            getattr(owner, kind)(torch.randn(3, 96).half(), *weight[owner], torch.ones(3), bounds=bounds)
        constants = spy.__getitem__.return_value.call_args.kwargs
        assert (constants["B1"], constants["B2"]) == (8, 24 if len(bounds) > 1 else 2**31 - 1)
