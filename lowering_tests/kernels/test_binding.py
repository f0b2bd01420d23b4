"""torch.ops.fp4_csrc: the binding compiled against this torch, with emulated kernels behind it. No GPU, no nvcc."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from dataclasses import replace

import pytest
import torch

from fp4_inductor import FP4Linear, formats
from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import KernelError, RowsError
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import build, csrc
from fp4_inductor.kernels.csrc import LIBRARIES
from fp4_inductor.kernels.forms import Epilogue, Norm, Options
from fp4_inductor.kernels.moe import decode_table, grouped_wide, on_csrc
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.ops import dequantize_fp8, linear, linear_w4a4, moe, moe_call, quantize_rows_fp8, quantize_rows_nvfp4
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.members import row_scales
from lowering_tests.fake_cuda import call_body, generated_code
from lowering_tests.kernels import emulator, sparse24
from lowering_tests.kernels.bound import ARCH, library_of, operators
from lowering_tests.kernels.emulator import emulated

pytestmark = pytest.mark.skipif(emulator.compiler() is None or build.cxx() is None, reason="no C++ compiler")


@pytest.fixture(scope="session")
def ops():
    return operators()


def weight(n, k):
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def exact(x, q, s, g, bias=None):
    y = x.double() @ nvfp4.dequantize(q, s, g, torch.float32).double().T
    return y if bias is None else y + bias.double()


def error(y, r) -> float:
    return ((y.double() - r).norm() / r.norm()).item()


@pytest.mark.parametrize("name", ["linear_small", "linear_wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers(ops, name, dtype):
    op = getattr(ops, name)
    for m, n, k, with_bias in ((3, 40, 128, False), (17, 33, 192, True), (5, 21, 80 if name == "linear_small" else 64, True)):
        x, w, bias = torch.randn(m, k).to(dtype), weight(n, k), torch.randn(n).to(dtype) if with_bias else None
        y = op(x, *w, bias, ARCH)
        assert y.shape == (m, n) and y.dtype == dtype
        assert error(y, exact(x, *w, bias)) <= 2 * linear.CONTRACT.tolerance[dtype]
    tile = (4, 8, 2) if name == "linear_small" else (128, 32, 2, 1)
    x, w = torch.randn(2, 128).to(dtype), weight(64, 128)
    assert error(op(x, *w, None, ARCH, *tile), exact(x, *w)) <= 2 * linear.CONTRACT.tolerance[dtype]


@pytest.mark.parametrize("name", ["sparse_linear_small", "sparse_linear_table", "sparse_linear_wide"])
def test_sparse(ops, name):
    op = getattr(ops, name)
    for m, n, dtype, bias in ((3, 40, torch.float16, None), (16, 33, torch.bfloat16, torch.randn(33).bfloat16())):
        x, w = torch.randn(m, 256).to(dtype), sparse24.weight(n, 256)
        want = x.double() @ sparse24.dense(*w).T + (0 if bias is None else bias.double())
        y = op(x, *w, bias, ARCH)
        assert y.shape == (m, n) and y.dtype == dtype
        assert error(y, want) <= sparse24.BOUND[dtype]
    tile = {"sparse_linear_small": (2, 8, 2, 1), "sparse_linear_table": (2, 1, 2, 2), "sparse_linear_wide": (128, 32, 2, 1)}[name]
    assert error(op(x, *w, bias, ARCH, *tile), want) <= sparse24.BOUND[dtype]
    with pytest.raises(RuntimeError, match="cudaError 9"):
        op(x, *w, bias, ARCH, *tile[:3], 3)
    torch.library.opcheck(op, (x, *w, bias, ARCH), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("name", ["sparse_linear_small", "sparse_linear_table", "sparse_linear_wide"])
def test_sparse_siblings(ops, name):
    """A library of its own takes several global scales; the one for one scale refuses them."""
    op, (*packed, _) = getattr(ops, f"{name}_scales"), sparse24.weight(70, 256)
    g, x = torch.tensor([0.37, 1.9, 0.02]), torch.randn(5, 256).to(torch.bfloat16)
    tile = (0,) * len(LIBRARIES[name].tile)
    y = op(x, *packed, g, None, ARCH, *tile, 32, 48)
    for i, (a, b) in enumerate(((0, 32), (32, 48), (48, 70))):
        want = x.double() @ sparse24.dense(*(p[a:b] for p in packed), g[i]).T
        assert error(y[:, a:b], want) <= sparse24.BOUND[torch.bfloat16]
    assert torch.equal(op(x, *packed, g, None, ARCH), getattr(ops, name)(x, *packed, g, None, ARCH))
    for words, other in {"fewer global scales": (op, g[:2].clone()), "cudaError 1 ": (getattr(ops, name), g)}.items():
        with pytest.raises(RuntimeError, match=words):
            other[0](x, *packed, other[1], None, ARCH, *tile, 32, 48)


def test_siblings(ops):
    q, s, _ = weight(70, 192)
    g, x = torch.tensor([0.37, 1.9, 0.02]), torch.randn(5, 192).to(torch.bfloat16)
    for name, tile in (("linear_small", (0, 0, 0)), ("linear_wide", (0, 0, 0, 0))):
        y = getattr(ops, name)(x, q, s, g, None, ARCH, *tile, 32, 48)
        for i, (a, b) in enumerate(((0, 32), (32, 48), (48, 70))):
            assert error(y[:, a:b], exact(x, q[a:b], s[a:b], g[i])) <= 2 * linear.CONTRACT.tolerance[torch.bfloat16]
        two = getattr(ops, name)(x, q, s, g, None, ARCH, *tile, 32)
        assert torch.equal(two[:, :48], y[:, :48])
        with pytest.raises(RuntimeError, match="fewer global scales"):
            getattr(ops, name)(x, q, s, g[:2].clone(), None, ARCH, *tile, 32, 48)


def test_epilogues(ops):
    q, s, g = weight(40, 128)
    g = g / 64
    x, mul, residual = (torch.randn(6, size).to(torch.bfloat16) for size in (128, 40, 40))
    tile = (0, 0, 0)
    z = exact(x, q, s, g)
    y = ops.linear_small_pointwise(x, q, s, g, None, ARCH, *tile, *Epilogue((), "silu", mul, residual.t().contiguous().t()).arguments())
    assert error(y, torch.nn.functional.silu(z) * mul.double() + residual.double()) <= 2 * linear.CONTRACT.tolerance[torch.bfloat16]
    y = ops.linear_small_glu(x, q, s, torch.stack((g, g)), None, ARCH, *tile, *Epilogue((20,), "relu").arguments())
    assert y.shape == (6, 20)
    assert error(y, torch.relu(z[:, :20]) * z[:, 20:]) <= 2 * linear.CONTRACT.tolerance[torch.bfloat16]
    for bad in (mul[:5], mul[:, :39], mul.float()):
        with pytest.raises(RuntimeError, match="mul and residual are as the result"):
            ops.linear_small_pointwise(x, q, s, g, None, ARCH, *tile, 0, 0, 0, bad)
    with pytest.raises(RuntimeError, match="cudaError 1"):
        ops.linear_small(x, q, s, g, None, ARCH, *tile, 0, 0, 1)
    torch.library.opcheck(
        ops.linear_small_glu, (x, q, s, g, None, ARCH), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_through_ctypes_it_is_the_same(ops, monkeypatch):
    """Where no C++ compiler is found: every argument in its place."""
    monkeypatch.setattr(csrc, "_library", lambda name, arch: (library_of(LIBRARIES[name]), ""))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    q, s, g = weight(40, 128)
    g = torch.stack((g, g * 3)) / 64
    x, bias, mul, residual = (torch.randn(*size).to(torch.float16) for size in ((6, 128), (40,), (6, 40), (6, 40)))
    for name, then in (
        ("linear_small", Epilogue((24,))),
        ("linear_small_glu", Epilogue((20,), "gelu")),
        ("linear_small_pointwise", Epilogue((), "silu", mul, residual)),
        ("linear_small_pointwise", Epilogue((8,), "", None, residual)),
        ("linear_wide", Epilogue((16,))),
    ):
        tile = [0] * len(LIBRARIES[name].tile)
        want = getattr(ops, name)(x, q, s, g, bias, ARCH, *tile, *then.arguments())
        assert torch.equal(csrc._through_ctypes(name, (x,), (q, s), g, bias, ARCH, (), then.arguments()), want), (name, then)
    (q, s, _), x8, bias = weight(40, 256), quantize_rows_fp8.reference(torch.randn(6, 256)), bias.bfloat16()
    w, tile = sparse24.weight(40, 256), (2, 1, 1, 2)
    want = ops.sparse_linear_table(x16 := torch.randn(6, 256).bfloat16(), *w, bias, ARCH, *tile)
    assert torch.equal(csrc._through_ctypes("sparse_linear_table", (x16,), w[:3], w[3], bias, ARCH, tile), want)
    want = ops.sparse_linear_wide_fp8(*x8, *w, bias, ARCH, 64, 1)
    assert torch.equal(csrc._through_ctypes("sparse_linear_wide_fp8", x8, w[:3], w[3], bias, ARCH, (64, 1)), want)
    want = ops.linear_wide_fp8(*x8, q, s, g, bias, ARCH, 0, 0, 24)
    assert torch.equal(csrc._through_ctypes("linear_wide_fp8", x8, (q, s), g, bias, ARCH, (), (24,)), want)


def test_strided_and_misaligned_tensors_are_copied(ops):
    q, s, g = weight(24, 128)
    x = torch.randn(4, 128).to(torch.bfloat16)
    want = ops.linear_small(x, q, s, g, None, ARCH)
    wide = torch.zeros(4, 300, dtype=torch.bfloat16)
    wide[:, 3:131] = x
    flat = torch.zeros(x.numel() + 1, dtype=torch.bfloat16)
    flat[1:] = x.flatten()
    assert flat[1:].data_ptr() % 16
    tall = torch.zeros(48, 64, dtype=torch.uint8)
    tall[::2] = q
    for args in ((wide[:, 3:131], q, s), (flat[1:].view(4, 128), q, s), (x.t().contiguous().t(), q, s), (x, tall[::2], s)):
        assert torch.equal(ops.linear_small(*args, g, None, ARCH), want)


def test_one_row_with_a_norm(ops, monkeypatch):
    """By the operator and through ctypes; what the operator refuses of a norm's weight."""
    monkeypatch.setattr(csrc, "_library", lambda name, arch: (library_of(LIBRARIES[name]), ""))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    x, w, own = torch.randn(1, 192).bfloat16(), weight(70, 192), torch.randn(192).bfloat16()
    h = torch.nn.functional.rms_norm(x.float(), (192,), own.float() + 1, 1e-5).bfloat16()
    for name, then, want in (
        ("linear_gemv", Epilogue(), exact(h, *w)),
        ("linear_gemv_pointwise", Epilogue(residual=(r := torch.randn(1, 70).bfloat16())), exact(h, *w) + r.double()),
    ):
        for early in (False, True):
            more = csrc.extra_arguments(name, Options((), then, early, Norm(own, 1e-5, 1.0)))
            y = getattr(ops, name)(x, *w, None, ARCH, *more)
            assert error(y, want) <= 2 * linear.CONTRACT.tolerance[torch.bfloat16]
            assert torch.equal(csrc._through_ctypes(name, (x,), w[:2], w[2], None, ARCH, more[:4], more[4:]), y)
    strided = torch.stack((own, own), 1)[:, 0]  # copied, and not read early
    copied, dense = (Options(early=True, norm=Norm(strided, 1e-5, 1.0)), Options(norm=Norm(own, 1e-5, 1.0)))
    first, second = (ops.linear_gemv(x, *w, None, ARCH, *csrc.extra_arguments("linear_gemv", options)) for options in (copied, dense))
    assert torch.equal(first, second)
    for bad in (own.float(), own[:64], own[None]):
        with pytest.raises(RuntimeError, match=r"the norm's weight is \[K\] in the activations' dtype"):
            ops.linear_gemv(x, *w, None, ARCH, *csrc.extra_arguments("linear_gemv", Options(norm=Norm(bad, 1e-5))))
    more = csrc.extra_arguments("linear_gemv", Options((0, 0, 0, 0), early=True, norm=Norm(own, 1e-5)))
    torch.library.opcheck(
        ops.linear_gemv, (x, *w, None, ARCH, *more), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_empty(ops):
    q, s, g = weight(8, 64)
    assert ops.linear_small(torch.empty(0, 64, dtype=torch.bfloat16), q, s, g, None, ARCH).shape == (0, 8)
    assert ops.linear_wide(torch.empty(3, 64, dtype=torch.bfloat16), q[:0], s[:0], g, None, ARCH).shape == (3, 0)


def test_what_it_refuses(ops):
    q, s, g = weight(8, 64)
    x = torch.randn(2, 64).to(torch.bfloat16)
    bias = torch.zeros(8, dtype=torch.bfloat16)
    for words, args in {
        r"activations are \[M, K\]": (x[0], q, s, g, None, ARCH),
        "bfloat16 or float16": (x.float(), q, s, g, None, ARCH),
        "does not fit N and K": (x[:, :32], q, s, g, None, ARCH),
        "a part of the weight does not fit": (x, q, s[:4], g, None, ARCH),
        "the bias is": (x, q, s, g, bias.float(), ARCH),
        "no kernel for sm_75": (x, q, s, g, None, 75),
        "cudaError 9": (x, q, s, g, None, ARCH, 3, 3, 3),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            ops.linear_small(*args)


def arguments_for(kernel: csrc.Library, m: int, n: int = 32, k: int = 256) -> tuple:
    """Activations of ``m`` rows, which take no memory, and a weight that fits them."""
    parts = {
        "x": (k, torch.bfloat16), "x8": (k, torch.float8_e4m3fn), "x_scale": (1, torch.float32), "x_qdata": (k // 2, torch.uint8),
        "row_scale": (1, torch.float32),
    }  # fmt: skip
    if kernel.codes:
        parts["x_scale"] = (k // 16, nvfp4.SCALE_DTYPE)
    x = (torch.zeros(1, columns).to(dtype).expand(m, columns) for columns, dtype in (parts[part] for part in kernel.activations))
    scales = torch.ones(2) if kernel.finish == "glu" else torch.tensor(1.0)
    w = sparse24.weight(n, k)[:3] if "meta" in kernel.weight else weight(n, k)[:2]
    return *x, *w, scales


def more_for(name: str, m: int, n: int = 32, k: int = 256) -> tuple:
    """What the operator takes behind ``arch``: two global scales of gate and up, and the operands of half an RMSNorm."""
    kernel = LIBRARIES[name]
    half = {"squares": (torch.ones(n, dtype=torch.bfloat16), 0.0), "rms": (torch.ones(m, k // 16), 1e-5)}.get(kernel.half, ())
    return csrc.extra_arguments(name, Options(then=Epilogue((16,) if kernel.finish == "glu" else ()), half=half))


LINEAR = [name for name, kernel in LIBRARIES.items() if kernel.weight]


@pytest.mark.parametrize("name", LINEAR)
def test_a_kernel_says_how_many_rows_it_serves(ops, monkeypatch, name):
    """A graph whose guards nobody checks may bring any number of rows. Both ways to a kernel refuse before they touch it, and name both numbers."""
    kernel, device = LIBRARIES[name], contextlib.nullcontext()
    monkeypatch.setattr(torch.cuda, "device", lambda _: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(csrc, "_library", lambda name, arch: 1 / 0)
    for arch in (80, 86, 87, 89, 90, 100, 120):  # of which this machine can emulate one: it is not asked for a kernel
        most = csrc.most_rows(name, arch)
        args = arguments_for(kernel, most + 1)
        with pytest.raises(RuntimeError, match=rf"fp4_csrc::{name} serves at most M = {most} activation rows, got M = {most + 1}\..*call torch.ops.fp4"):
            getattr(ops, name)(*args, None, arch)
        with pytest.raises(RowsError, match=rf"fp4_{name} got more .*got M = {most + 1}; accepted: M = 1 to {most}\..*call torch.ops.fp4"):
            csrc._through_ctypes(name, args[: len(kernel.activations)], args[len(kernel.activations) : -1], args[-1], None, arch)


@pytest.mark.parametrize("name", [name for name in LINEAR if csrc.most_rows(name, ARCH) <= 32])
def test_that_is_how_many_rows_the_kernel_serves(ops, monkeypatch, name):
    kernel, most = LIBRARIES[name], csrc.most_rows(name, ARCH)
    monkeypatch.setattr(csrc, "_library", lambda name, arch: (library_of(LIBRARIES[name]), ""))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    args = arguments_for(kernel, most)
    y = getattr(ops, name)(*args, None, ARCH, *more_for(name, most))
    y = y[0] if isinstance(y, tuple) else y
    assert y.shape == (most, 16 if kernel.finish == "glu" else 32)
    monkeypatch.setattr(csrc, "most_rows", lambda name, arch: most + 1)
    x, w, g = arguments_for(kernel, most + 1)[:1], args[1:-1], args[-1]
    with pytest.raises(KernelError, match=rf"cudaError 1 for M={most + 1}"):
        csrc._through_ctypes(name, x, w, g, None, ARCH, (), more_for(name, most + 1)[len(kernel.tile) :])


def test_no_choice_gives_a_kernel_more_rows_than_it_serves():
    off = DispatchConfig(candidates=("cuda_small_glu", "cuda_small_pointwise"))
    seen = set()
    for op, arch, prefill in itertools.product(("linear", "linear_glu", "linear_epilogue", "sparse_linear"), (80, 86, 90, 100, 120), ("auto", "bf16", "nvfp4")):
        for n, k in ((64, 64), (64, 1088), (4096, 4096), (8192, 2880), (16384, 16384), (65536, 4096)):
            for row in plan(Call(op, arch, torch.bfloat16, n, k, prefill), off).rows:
                if row.csrc and LIBRARIES[row.csrc].weight:
                    seen.add(row.csrc)
                    assert (row.max_m or 0) <= csrc.most_rows(row.csrc, arch), row
    assert {"linear_small", "linear_table", "linear_small_glu", "linear_table_pointwise", "sparse_linear_small", "sparse_linear_table"} <= seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_as_codes(ops, dtype):
    for m, n, k, with_bias in ((3, 40, 128, False), (70, 33, 192, True)):
        x = torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None]
        rows = quantize_rows_nvfp4.row_scales(x)
        args = (*quantize_rows_nvfp4.reference(x, rows), rows, *nvfp4.quantize(torch.randn(n, k) / k**0.5))
        bias = torch.randn(n).to(dtype) if with_bias else None
        y = ops.linear_w4a4(*args, bias, 120, int(dtype == torch.float16))
        assert y.dtype == dtype
        assert error(y, linear_w4a4.reference(*args, None if bias is None else bias.float(), torch.float32).double()) <= 2 * linear.CONTRACT.tolerance[dtype]
    torch.library.opcheck(ops.linear_w4a4, (*args, bias, 120, int(dtype == torch.float16)), test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
    for words, bad in {
        "does not fit M, N and K": (args[0], args[1][:5], *args[2:]),
        "codes are": (args[0][0], *args[1:]),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            ops.linear_w4a4(*bad, None, 120)
    with pytest.raises(RuntimeError, match="result's dtype"):
        ops.linear_w4a4(*args, torch.zeros(33), 120)


def test_activations_in_e4m3(ops):
    (q, s, _), bias = weight(70, 512), torch.randn(70).bfloat16()
    g, x = torch.tensor([0.37, 1.9, 0.02]), quantize_rows_fp8.reference(torch.randn(130, 512) * torch.logspace(-3, 3, 130)[:, None])
    w8 = dequantize_fp8.reference(q, s).double() / dequantize_fp8.WEIGHT_FACTOR
    for tile, starts in (((), ()), ((128, 1), (32,)), ((256, 0), (32, 48))):
        y = ops.linear_wide_fp8(quantize_rows_fp8.in_lane_order(x[0]), x[1], q, s, g, bias, ARCH, *(tile or ((0, 0) if starts else ())), *starts)
        assert y.dtype == torch.bfloat16
        rows = row_scales(g, (0, *starts), 70).double()
        want = (x[0].double() * x[1].double()) @ (w8 * rows[:, None]).T + bias.double()
        assert error(y, want) <= 2.5e-3, tile
    args = (*x, q, s, g[0])
    torch.library.opcheck(ops.linear_wide_fp8, (*args, bias, ARCH), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))
    assert ops.linear_wide_fp8(x[0][:0], x[1][:0], q, s, g, None, ARCH).shape == (0, 70)
    for words, bad in {
        "does not fit M, N and K": (x[0], x[1][:5], *args[2:]),
        "are float8_e4m3fn": (x[0].bfloat16(), *args[1:]),
        "result's dtype": (*args, torch.zeros(70), ARCH),
        "fewer global scales": (*args, None, ARCH, 0, 0, 32),
        "cudaError 9": (*args, None, ARCH, 32, 1),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            ops.linear_wide_fp8(*bad, *(None, ARCH)[len(bad) - 5 :])


def test_activations_in_e4m3_and_a_sparse_weight(ops):
    w, bias = sparse24.weight(70, 512), torch.randn(70).bfloat16()
    x = quantize_rows_fp8.reference(torch.randn(130, 512) * torch.logspace(-3, 3, 130)[:, None])
    w8 = torch.ops.fp4.sparse_dequantize_fp8(*w[:3]).double() * (w[3].double() / dequantize_fp8.WEIGHT_FACTOR)
    for tile in ((), (128, 1), (256, 0)):
        y = ops.sparse_linear_wide_fp8(*x, *w, bias, ARCH, *tile)
        assert y.dtype == torch.bfloat16
        assert error(y, (x[0].double() * x[1].double()) @ w8.T + bias.double()) <= 2.5e-3, tile
    args = (*x, *w)
    torch.library.opcheck(
        ops.sparse_linear_wide_fp8, (*args, bias, ARCH), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    assert ops.sparse_linear_wide_fp8(x[0][:0], x[1][:0], *w, None, ARCH).shape == (0, 70)
    for words, bad in {
        "does not fit M, N and K": (*args[:3], args[3][:, :5], *args[4:]),
        "are float8_e4m3fn": (x[0].bfloat16(), *args[1:]),
        "cudaError 9": (*args, None, ARCH, 32, 1),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            ops.sparse_linear_wide_fp8(*bad, *(None, ARCH)[len(bad) - 6 :])


def test_opcheck(ops):
    for op in (ops.linear_small, ops.linear_wide):
        x, w = torch.randn(3, 64).to(torch.bfloat16), weight(8, 64)
        # test_schema compares inputs by allclose, which has no float8 kernel
        torch.library.opcheck(op, (x, *w, None, ARCH), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_a_compiled_graph_calls_the_operator_directly():
    """Without Python between the graph and the kernel; the bias is the kernel's."""
    for m, name in ((8, "linear_small"), (48, "linear_wide")):
        build_layer = lambda: FP4Linear(128, 64, bias=True, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        body = call_body(generated_code(build_layer, [((2, m // 2, 128), torch.bfloat16)], csrc="")[0])
        assert f"torch.ops.fp4_csrc.{name}.default(" in body, body
        assert "ops.fp4.linear" not in body


def test_a_moe_layer(ops, monkeypatch):
    """By the operator and through ctypes: every argument in its place."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(csrc, "_library", lambda name, arch: (emulated(LIBRARIES[name].source, arch).library, ""))
    e, t, h, inner, n = 5, 9, 192, 128, 136
    parts = [
        (torch.randint(0, 256, (e, r, k // 2), dtype=torch.uint8), torch.randint(0x28, 0x40, (e, r, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE),
         (torch.rand(e) + 0.5) / k) for r, k in ((2 * inner, h), (n, inner))
    ]  # fmt: skip
    biases = torch.randn(e, 2 * inner).to(torch.bfloat16), torch.randn(e, n).to(torch.bfloat16)
    x, weights = torch.randn(t, h).to(torch.bfloat16), torch.rand(t, 3)
    for act, ids, table, w, b in (
        (Activation(), torch.randint(-1, 6, (t, 3)), None, weights, (None, None)),
        (Activation("swiglu_oai", 1.702, 7.0, True), torch.randint(0, 7, (t, 3), dtype=torch.int32), torch.randint(-1, 5, (6,)), weights.half(), biases),
        (Activation("silu", limit=0.5), torch.randint(0, 5, (t, 3)), torch.arange(5, dtype=torch.int32), weights.to(torch.bfloat16), (biases[0], None)),
    ):
        given = moe_call.MoeCall(x, ids, w, *map(moe_call.ExpertWeight.of_parts, parts, b), act, False, table)
        y = grouped_wide.launch(given, ARCH)
        want = moe.reference(replace(given, hidden=x.float()))
        assert y.shape == (t, n) and error(y, want.double()) <= 4e-3
        rounded = grouped_wide.launch(given, ARCH, fp8=True)
        assert error(rounded, want.double()) <= 0.09
        few = decode_table.launch(given, ARCH)
        assert error(few, want.double()) <= 4e-3
        with monkeypatch.context() as patched:
            for name in (grouped_wide.NAME, grouped_wide.FP8, decode_table.NAME):
                patched.setattr(torch.ops.fp4_csrc, name, functools.partial(on_csrc.through_ctypes, name))
            assert torch.equal(decode_table.launch(given, ARCH), few)
            assert torch.equal(grouped_wide.launch(given, ARCH), y)
            assert torch.equal(grouped_wide.launch(given, ARCH, fp8=True), rounded)
    form = (*parts[0], *parts[1], None, None, None, 1.0, 0.0, 0, 0, 8, 0)
    torch.library.opcheck(ops.moe_grouped_wide, (x, ids, weights, *form, ARCH), test_utils=("test_autograd_registration", "test_faketensor"))
    for words, bad in {
        "activations are bfloat16": (x.half(), ids, weights, *form),
        "do not belong together": (x, ids[:3], weights, *form),
        "a part of the weights does not fit": (x[:, :64], ids, weights, *form),
        "ids are int32 or int64": (x, ids.to(torch.int16), weights, *form),
        "cudaError 1 for T=0": (x[:0], ids[:0], weights[:0], *form),
        "cudaError 9 for T=9": (x, ids, weights, *form[:-2], 24, 0),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            ops.moe_grouped_wide(*bad, ARCH)
    with pytest.raises(KernelError, match="was not launched"):
        grouped_wide.launch(moe_call.MoeCall(x, ids, weights, *map(moe_call.ExpertWeight.of_parts, parts)), ARCH, grouped_wide.Tile(24))
    form = (*form[:9], None, None, *form[9:-2])
    torch.library.opcheck(ops.moe_decode_table, (x, ids, weights, *form, ARCH), test_utils=("test_autograd_registration", "test_faketensor"))
    with pytest.raises(RuntimeError, match="cudaError 1 for T=0"):
        ops.moe_decode_table(x[:0], ids[:0], weights[:0], *form, ARCH)


def test_a_sparse_moe_layer(ops, monkeypatch):
    """One product 2:4-sparse, or both, by the operator and through ctypes."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(csrc, "_library", lambda name, arch: (emulated(LIBRARIES[name].source, arch).library, ""))
    e, t, h, inner, n = 3, 3, 256, 256, 40
    x, ids, w = torch.randn(t, h).to(torch.bfloat16), torch.randint(0, e, (t, 2)), torch.rand(t, 2)
    for kinds in ((True, True), (False, True), (True, False)):
        dense = [torch.randn(e, r, k) / 16 for r, k in ((2 * inner, h), (n, inner))]
        quantized = [
            formats.sparse24.quantize_sparse24(v, formats.sparse24.magnitude_mask(v)) if s else nvfp4.quantize(v) for v, s in zip(dense, kinds, strict=True)
        ]
        given = moe_call.MoeCall(x, ids, w, *map(moe_call.ExpertWeight.of_parts, quantized))
        y = decode_table.launch(given, ARCH)
        want = moe.reference(replace(given, hidden=x.float()))
        assert error(y, want.double()) <= 4e-3
        with monkeypatch.context() as patched:
            patched.setattr(torch.ops.fp4_csrc, decode_table.NAME, functools.partial(on_csrc.through_ctypes, decode_table.NAME))
            assert torch.equal(decode_table.launch(given, ARCH), y)
