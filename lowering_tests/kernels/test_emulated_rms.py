"""The halves of an RMSNorm in cuda_table, on a CPU (emulator.py): what the first product writes, and what the second does with it."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import dispatch
from fp4_inductor.config import dispatch_config
from fp4_inductor.kernels import csrc, host, select
from fp4_inductor.kernels.forms import Epilogue, Options
from fp4_inductor.kernels.linear import rms as rms_kernels
from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops import CONTRACTS, rms_linear
from lowering_tests.kernels import emulator
from lowering_tests.kernels.bound import ARCH, operators
from lowering_tests.kernels.emulator import EmulatorError, linear_fields
from lowering_tests.kernels.test_emulated_epilogue import distance, library, small_weight
from lowering_tests.kernels.test_emulated_linear import BF16, FP16
from lowering_tests.norm_kernels import switched_on

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
EPS, CONSTANTS = 1e-5, ("codes", "scale", "norm_weight")  # what may be read, and prefetched, while the kernel before it runs
OWN = (0, 0, 0, 0)


def norm_weight(n, dtype):
    return (torch.randn(n) * 0.5 + 1).to(dtype)


def squares(m=3, n=80, k=512, dtype=BF16, tile=OWN, offset=0.0, several=False, seed=0):
    """Results of the kernel, and those of the op's reference."""
    x, (q, s, g) = torch.randn(m, k).to(dtype), small_weight(n, k)
    g, starts = (torch.stack((g, g * 3)), (16,)) if several else (g, ())
    bias, residual, weight = torch.randn(n).to(dtype) if several else None, torch.randn(m, n).to(dtype), norm_weight(n, dtype)
    z, sums = torch.full((m, n), float("nan"), dtype=dtype), torch.full((m, n // 16), float("nan"))
    given = dict(linear_fields(x, (q, s, g), bias, tile, starts), residual=residual, norm_weight=weight, norm_offset=offset, z=z, squares=sums, early=1)
    kernel = library("linear_table_pointwise_squares")
    y = kernel.run(LinearParams, given, torch.full((m, n), float("nan"), dtype=dtype), constants=CONSTANTS, changed=(z, sums), seed=seed)
    want = CONTRACTS["linear_residual_squares"].reference(x, q, s, g, bias, residual, weight, offset, "auto", [0, *starts] if several else None)
    return (y, z, sums), want, weight


# rows, N: less than a warp's pairs in a block, off its rows, several blocks; tiles of one and two sets a warp, and of four steps a stage.
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "tile", "offset"),
    [
        (2, 16, 256, BF16, OWN, 0.0),
        (3, 80, 512, FP16, (3, 1, 2, 1), 1.0),
        (8, 96, 1024, BF16, (2, 2, 4, 4), 0.0),
        (17, 112, 512, BF16, (4, 2, 2, 1), 1.0),
        (32, 48, 768, FP16, OWN, 0.0),
    ],
)
def test_what_the_first_product_writes(m, n, k, dtype, tile, offset):
    (y, z, sums), (want, _, _), weight = squares(m, n, k, dtype, tile, offset, several=m in (3, 17))
    assert distance(y, want) <= CONTRACTS["linear_residual_squares"].tolerance[dtype]
    assert torch.equal(z, rms_linear.weighted(y, weight, offset)), "of y as it is rounded"
    assert torch.allclose(sums, rms_linear.squares_of(y), rtol=1e-6, atol=0)


def rms(name, m, n, k, dtype, tile, several, seed=0, nan=None):
    """The result of the kernel, and that of the op's reference."""
    y, weight = (torch.randn(m, k) * torch.logspace(-3, 2, m)[:, None]).to(dtype), norm_weight(k, dtype)
    if nan is not None:
        y[nan, 5] = float("nan")
    z, sums = rms_linear.weighted(y, weight, 0.0), rms_linear.squares_of(y)
    q, s, g = small_weight(n, k)
    glu = "glu" in name
    g, starts = (torch.stack((g, g * 3)), (n // 2 if glu else 16,)) if several else (g, ())
    bias = torch.randn(n).to(dtype) if several else None
    given = dict(linear_fields(z, (q, s, g), bias, tile, starts), squares=sums, eps=EPS, act=1 if glu else 0, early=1)
    out = library(name).run(LinearParams, given, torch.full((m, n // 2 if glu else n), float("nan"), dtype=dtype), constants=CONSTANTS[:2], seed=seed)
    if glu:
        return out, CONTRACTS["rms_scaled_linear_glu"].reference(z, sums, EPS, q, s, g, bias, "silu")
    return out, CONTRACTS["rms_scaled_linear"].reference(z, sums, EPS, q, s, g, bias, "auto", [0, *starts] if several else None)


@pytest.mark.parametrize("name", ["linear_table_rms", "linear_table_glu_rms"])
def test_the_second_product_scales_its_sums(name):
    for i, (m, n, k, dtype, tile) in enumerate(
        ((2, 66, 256, BF16, OWN), (5, 96, 1024, FP16, OWN), (16, 64, 512, BF16, (2, 1, 2, 1)), (32, 130, 768, BF16, OWN))
    ):
        got, want = rms(name, m, n, k, dtype, tile, several=i % 2 == 1)
        for row in range(m):  # each has a factor of its own
            assert distance(got[row], want[row]) <= 2 * CONTRACTS["linear"].tolerance[dtype], (m, row)


def test_a_row_that_is_not_a_number_stays_alone():
    got, want = rms("linear_table_rms", 4, 32, 512, BF16, OWN, several=False, nan=2)
    assert got[2].isnan().all() and not got[[0, 1, 3]].isnan().any() and distance(got[[0, 1, 3]], want[[0, 1, 3]]) <= 8e-3


def test_threads_in_another_order():
    """And the same bits."""
    for seed in (1, 2):
        torch.manual_seed(0)
        first, *_ = squares(m=9, n=64, k=512)
        torch.manual_seed(0)
        again, *_ = squares(m=9, n=64, k=512, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


EARLY = "global memory before the previous"


@pytest.mark.parametrize(
    ("fault", "run", "words"),
    [
        ("HALF_OF_THE_SQUARES", "squares", None),
        ("STORE_BEFORE_PDL_WAIT", "squares", f"(read|write) of {EARLY}"),
        ("WITHOUT_EPS", "rms", None),
        ("STORE_BEFORE_PDL_WAIT", "rms", f"read of {EARLY}"),
    ],
)
def test_a_broken_half_is_caught(fault, run, words):
    def error():
        if run == "squares":
            (y, _, sums), *_ = squares()
            return distance(sums, rms_linear.squares_of(y))
        got, want = rms("linear_table_rms", 4, 32, 512, BF16, OWN, several=False)
        return max(distance(a, b) for a, b in zip(got, want, strict=True))

    emulator.check_caught(library("linear_table_pointwise_squares" if run == "squares" else "linear_table_rms"), fault, words, error)


def test_operands_that_a_library_does_not_take():
    x, w, out = torch.zeros(2, 256, dtype=BF16), small_weight(16, 256), torch.zeros(2, 16, dtype=BF16)
    z, sums = torch.zeros(2, 16, dtype=BF16), torch.zeros(2, 16)
    plain, weight = linear_fields(x, w, None, OWN), norm_weight(16, BF16)
    for name, more in (
        ("linear_table", dict(squares=sums)),
        ("linear_table_rms", {}),
        ("linear_table_rms", dict(squares=sums, norm_weight=weight)),
        ("linear_table_pointwise_squares", dict(z=z, squares=sums)),
        ("linear_table_pointwise_squares", dict(z=z, norm_weight=weight)),
    ):
        with pytest.raises(EmulatorError, match="status 1"):
            library(name).run(LinearParams, dict(plain, **more), out)
    odd = dict(linear_fields(x, small_weight(24, 256), None, OWN), z=z, squares=sums, norm_weight=norm_weight(24, BF16))
    with pytest.raises(EmulatorError, match="status 1"):
        library("linear_table_pointwise_squares").run(LinearParams, odd, torch.zeros(2, 24, dtype=BF16))


def test_the_operators():
    """Of the binding: three results, and the sums of squares of the rows of the next product's activations."""
    operators()
    m, n, k = 3, 256, 512
    x, w, residual, weight = torch.randn(m, k).to(BF16), small_weight(n, k), torch.randn(m, n).to(BF16), norm_weight(n, BF16)
    options = Options(then=Epilogue(residual=residual), early=True, half=(weight, 1.0))
    y, z, sums = csrc.call("linear_table_pointwise_squares", x, w[:2], w[2], None, ARCH, options)
    want = CONTRACTS["linear_residual_squares"].reference(x, *w, None, residual, weight, 1.0)
    assert [tuple(t.shape) for t in (y, z, sums)] == [(m, n), (m, n), (m, n // 16)] and sums.dtype == torch.float32
    assert all(distance(a, b) <= 8e-3 for a, b in zip((y, z, sums), want, strict=True))
    gate_up = small_weight(64, n)
    got = csrc.call("linear_table_glu_rms", z, gate_up[:2], gate_up[2], None, ARCH, Options(then=Epilogue(act="silu"), half=(sums, EPS)))
    assert distance(got, CONTRACTS["rms_scaled_linear_glu"].reference(z, sums, EPS, *gate_up, None, "silu")) <= 8e-3
    with pytest.raises(Exception, match=r"squares are float32 \[M, K / 16\]"):
        csrc.call("linear_table_rms", z, gate_up[:2], gate_up[2], None, ARCH, Options(half=(sums[:, 1:], EPS)))
    with pytest.raises(Exception, match=r"the norm's weight is \[N\]"):
        csrc.call("linear_table_pointwise_squares", x, w[:2], w[2], None, ARCH, Options(then=Epilogue(residual=residual), half=(weight[1:], 1.0)))


def test_eager_calls(monkeypatch):
    """``torch.ops.fp4`` on CUDA: by the kernels where they serve M, in steps elsewhere; leading sizes, several global scales, siblings."""

    def row_for(op, x, m, n, k, prefill="auto", form=(), counts=select.ONE):
        return select.plan(select.Call(op, ARCH, x.dtype, n, k, prefill, scales=counts.scales, eager=True), dispatch_config()).pick(m)

    operators()
    served: list[str] = []
    call = csrc.call
    monkeypatch.setattr(host, "row_for", row_for)
    monkeypatch.setattr(host, "arch", lambda device: ARCH)
    monkeypatch.setattr(csrc, "call", lambda name, *args: (served.append(name), call(name, *args))[1])
    k, n = 256, 96
    (q, s, g), (q2, s2, g2) = small_weight(k, 512), small_weight(n, k)
    apart, of_two = [0, 16, 32, n], torch.stack([g2, g2 * 2])
    for lead, count in (((2, 4), 3 + 5), ((1,), 0)):
        x, residual, weight = torch.randn(*lead, 512).to(BF16), torch.randn(*lead, k).to(BF16), norm_weight(k, BF16)
        calls = [
            ("linear_residual_squares", (x, q, s, scales, None, residual, weight, 1.0, "auto", rows))
            for scales, rows in ((g, None), (g[None], [0]), (torch.stack([g, g * 2]), [0, 32]), (g * torch.arange(1, 5), [0, 32, 64, 96]))
        ]
        _, z, sums = CONTRACTS["linear_residual_squares"].reference(*calls[0][1])
        behind = (z, sums, EPS)
        calls += [
            ("rms_scaled_linear", (*behind, q2, s2, of_two, None, "auto", [0, 16])),
            ("rms_scaled_linear", (*behind, q2, s2, g2[None], None, "auto", [0])),
            ("rms_scaled_linear_siblings", (*behind, q2, s2, of_two, None, apart)),
            ("rms_scaled_linear_siblings", (*behind, q2, s2, of_two, None, [0, 0, 32, n])),  # a member without rows has no scale in the kernel
            ("rms_scaled_linear_glu", (*behind, q2, s2, g2, None, "gelu")),
            ("rms_scaled_linear_glu", (*behind, q2, s2, of_two, None)),
        ]
        with dispatch(candidates=switched_on()):
            for name, args in calls:
                given = (rms_linear.SquaresCall.of(*args),) if name == "linear_residual_squares" else args
                got, want = ([r] if isinstance(r, torch.Tensor) else r for r in (getattr(rms_kernels, name)(*given), CONTRACTS[name].reference(*args)))
                for a, b in zip(got, want, strict=True):
                    assert a.shape == b.shape and a.dtype == b.dtype and (not a.numel() or distance(a, b) <= 1e-2), (lead, name)
        assert len(served) == count
        served.clear()
