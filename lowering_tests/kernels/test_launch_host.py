"""The host side of fp4.linear on CUDA, without a GPU: fake tensors on a pretended device, launchers replaced by a spy."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import forms, host, registry, run
from fp4_inductor.kernels.linear import cuda as linear
from fp4_inductor.kernels.router import triton_router, two_launches
from fp4_inductor.kernels.sparse_linear import cuda as sparse_linear
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
    with mock.patch.object(run, "launched", launched):
        y = linear.linear(torch.empty(*lead, k, device="cuda"), *parts(n, k), bias)
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
        mock.patch.multiple(triton_router, router_scores=spy("scores"), router_choice=spy("choice")),
        mock.patch.object(host, "arch", return_value=90),
        mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()),
    ):
        weights, ids = two_launches.launch(x, weight, bias, 2, "softmax", torch.float32)
    assert (weights.shape, weights.dtype, ids.dtype) == ((t, 2), torch.float32, torch.int64)
    if t > two_launches.MOST_TOKENS:
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
    with mock.patch.object(run, "launched", launched):
        assert tuple(sparse_linear.sparse_linear(torch.empty(*lead, k, device="cuda"), *weight).shape) == (*lead, n)


TRITON = {(kernel.op, kernel.name): kernel.form for kernel in registry.kernels() if isinstance(kernel.form, forms.Triton)}


def parts_of(op: str) -> tuple[torch.Tensor, ...]:
    """Of a weight ``[40, 96]``, without its global scales."""
    q, s, _ = nvfp4.quantize(torch.randn(40, 96))
    sparse = torch.empty(40, 24, dtype=torch.uint8), torch.empty(40, 12, dtype=torch.uint8), s
    codes = torch.empty(3, 48, dtype=torch.uint8), torch.empty(3, 6, dtype=torch.uint8), torch.ones(3, 1)
    return {"sparse_linear": sparse, "linear_fp8": (torch.empty(40, 96, dtype=torch.float8_e4m3fn),), "linear_w4a4": (*codes, q, s)}.get(op, (q, s))


@pytest.mark.parametrize(("op", "name"), TRITON)
def test_a_triton_kernel_is_given_every_argument_and_no_other(op, name):
    """A constant that the kernel does not take would be an error on a GPU only."""
    form, spy = TRITON[op, name], mock.MagicMock()
    inputs = (*(() if op == "linear_w4a4" else (torch.randn(3, 96).half(),)), *parts_of(op), torch.tensor(1.0))
    with mock.patch.object(forms, "source", return_value=spy):
        run.by_triton(form, inputs, forms.Problem(3, 40, 96, 90, torch.float16))
    positional, keywords = spy.__getitem__.return_value.call_args
    names = form.source().arg_names
    given = {*names[: len(positional)], *keywords}
    assert len(given) == len(positional) + len(keywords)
    assert given == {*names, "num_warps", "num_stages"}


@pytest.mark.parametrize("op", ["linear", "sparse_linear"])
def test_several_scales_are_one_launch_and_more_than_three_are_several(fake_gpu, op):
    owner = linear if op == "linear" else sparse_linear
    codes, scale, _ = parts(64, 64)
    weight = (codes, scale) if op == "linear" else (codes.new_empty(64, 16), codes.new_empty(64, 8), scale)
    calls = []

    def launched(kernel, x, weight, bias, bounds=()):
        calls.append((weight[0].shape[0], tuple(weight[-1].shape), bounds, None if bias is None else len(bias)))
        return x.new_empty(x.shape[0], weight[0].shape[0])

    x, bias = torch.empty(5, 64, device="cuda", dtype=torch.float16), torch.empty(64, device="cuda", dtype=torch.float16)
    with mock.patch.object(run, "launched", launched):
        for rows, want in (
            ([0], [(64, (), (), 64)]),
            ([0, 7], [(64, (2,), (7,), 64)]),
            ([0, 32, 40], [(64, (3,), (32, 40), 64)]),
            ([0, 7, 9, 40], [(40, (3,), (7, 9), 40), (24, (), (), 24)]),
            ([0, 7, 9, 40, 50], [(40, (3,), (7, 9), 40), (24, (2,), (10,), 24)]),
        ):
            calls.clear()
            y = getattr(owner, op)(x, *weight, torch.empty(len(rows), device="cuda"), bias, "auto", rows)
            assert tuple(y.shape) == (5, 64)
            assert calls == want, rows


@pytest.mark.parametrize(("op", "name"), [key for key in TRITON if key[0] in ("linear", "sparse_linear", "linear_w4a4")])
@pytest.mark.parametrize("bounds", [(8,), (8, 24)])
def test_a_triton_kernel_is_told_where_scales_begin(op, name, bounds):
    constants = TRITON[op, name].options(forms.Problem(3, 40, 96, 90, torch.float16, bounds), False)[0]
    assert (constants["B1"], constants["B2"]) == (8, 24 if len(bounds) > 1 else 2**31 - 1)


def test_an_fp8_product_rounds_its_activations_and_may_begin_early():
    library = registry.named("linear")["cuda_wide_fp8"].library
    with mock.patch.object(run.csrc, "call") as call, mock.patch.object(host, "arch", return_value=90):
        run.by_library(library, torch.randn(3, 256).bfloat16(), (*nvfp4.quantize(torch.randn(16, 256)),), None, (8,))
    (name, (x8, x_scale), _, _, _, arch, options), _ = call.call_args
    assert (name, x8.dtype, tuple(x_scale.shape), arch) == ("linear_wide_fp8", torch.float8_e4m3fn, (3, 1), 90)
    assert options == forms.Options(then=forms.Epilogue((8,)), early=True)
