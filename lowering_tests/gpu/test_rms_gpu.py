"""An RMSNorm of 2 to 32 rows as halves of the products around it, on a GPU: numbers, rows that are not numbers, replays, whole layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import compile_range
from fp4_inductor.kernels import host
from fp4_inductor.ops import CONTRACTS, rms_linear
from fp4_inductor.passes import matches, missed, reset_matches
from lowering_tests.gpu import helpers
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error, weight
from lowering_tests.gpu.test_norm_gpu import Layer

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4
EPS = 1e-6
ROWS = (2, 3, 8, 16, 17, 24, 32)
# hidden, K of the first product, N of the next: a block of 16, 32, 48 and 64 columns writes squares.
SIZES = ((2048, 2048, 2560), (4096, 12288, 6144), (5120, 5120, 1000), (8192, 1024, 66))


def serving(**options):
    """The kernels with half of an RMSNorm serve, where they are off by default, too."""
    return helpers.serving(lambda library: library.half, "linear_residual_squares", **options)


@pytest.fixture(autouse=True)
def _inference():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def norm_weight(k, dtype):
    return (torch.randn(k, device=DEVICE) / 2 + 1).to(dtype)


def first(m, n, k, dtype, several=False):
    """Arguments of ``fp4.linear_residual_squares``, the rows of different sizes."""
    q, s, g = weight(n, k)
    x = (torch.randn(m, k, device=DEVICE) * torch.logspace(-1, 1, m, device=DEVICE)[:, None]).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype) if several else None
    rows, g = ([0, n // 4, n // 2], torch.stack([g, 3 * g, g / 5])) if several else (None, g)
    return x, q, s, g, bias, torch.randn(m, n, device=DEVICE).to(dtype), norm_weight(n, dtype), float(several), "auto", rows


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_against_float64(m, dtype):
    tolerance = CONTRACTS["linear"].tolerance[dtype]
    with serving():
        for i, (hidden, k, n) in enumerate(SIZES):
            several = i % 2 == 1
            args = first(m, hidden, k, dtype, several)
            assert host.row_for("linear_residual_squares", args[0], m, hidden, k).csrc and host.row_for("rms_scaled_linear", args[0], m, n, hidden).csrc
            y, z, squares = fp4.linear_residual_squares(*args)
            assert error(y, CONTRACTS["linear_residual_squares"].reference(*args)[0].double()) <= 2 * tolerance
            assert torch.equal(z, rms_linear.weighted(y, args[6], args[7])), "of y as it is rounded"
            assert torch.allclose(squares, rms_linear.squares_of(y), rtol=1e-5, atol=0)
            normed = F.rms_norm(y.double(), (hidden,), args[7] + args[6].double(), EPS)
            q, s, g = weight(n, hidden)
            bias = torch.randn(n, device=DEVICE).to(dtype) if several else None
            third = n // 3
            scales = torch.stack([g, 3 * g, g / 5])
            members = [0, third, third, 2 * third, 2 * third, n]
            calls = {
                "linear": [(q, s, g, bias), (q, s, scales, bias, "auto", [0, third, 2 * third])],
                "linear_siblings": [(q, s, g, bias, members), (q, s, scales, bias, members)],
                "linear_glu": [(q, s, g, bias, "silu"), (q, s, torch.stack([g, 3 * g]), bias, "gelu_tanh")],
            }
            for name, given in calls.items():
                for rest in given:
                    got = getattr(fp4, f"rms_scaled_{name}")(z, squares, EPS, *rest)
                    bias64 = [None if t is bias and t is None else t.float() if t is bias else t for t in rest]
                    want = CONTRACTS[name].reference(normed.float(), *bias64)
                    for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (got, want)), strict=True):
                        assert a.dtype == dtype
                        for row in range(m):
                            assert error(a[row], b[row].double()) <= 3 * tolerance, (name, hidden, row)


@pytest.mark.parametrize("m", [2, 8, 32])
def test_a_row_that_is_not_a_number_stays_alone(m):
    with serving():
        args = first(m, 4096, 4096, BF16)
        args[0][1, 7] = float("nan")
        y, z, squares = fp4.linear_residual_squares(*args)
        other = [i for i in range(m) if i != 1]
        for t in (y, z, squares):
            assert t[1].isnan().all() and t[other].isfinite().all()
        for got in (fp4.rms_scaled_linear(z, squares, EPS, *weight(6144, 4096)), fp4.rms_scaled_linear_glu(z, squares, EPS, *weight(8192, 4096))):
            assert got[1].isnan().all() and got[other].isfinite().all()


@pytest.mark.parametrize("m", ROWS)
def test_launches_are_bit_equal(m):
    with serving():
        args, (q, s, g) = first(m, 4096, 4096, BF16), weight(8192, 4096)
        want = None
        for _ in range(20):
            y, z, squares = fp4.linear_residual_squares(*args)
            got = (y, z, squares, fp4.rms_scaled_linear(z, squares, EPS, q, s, g), fp4.rms_scaled_linear_glu(z, squares, EPS, q, s, g))
            want = want or got
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("m", [2, 8, 17, 32])
def test_layers(m, offset):
    """All norms but that of the graph's input, whose kernel is its own; replays are bit-equal, with and without programmatic dependent launch."""
    model = nn.Sequential(*(Layer(offset=offset) for _ in range(3)))
    x = torch.randn(m, 1024, device=DEVICE, dtype=BF16) * 7
    want = model(x)
    with serving(), missed.listen() as left:
        reset_matches()
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        got = compiled(x).clone()
        counted = matches()
        assert all(torch.equal(compiled(x), got) for _ in range(50))
    names = ("linear_residual_squares", "rms_scaled_linear_siblings", "rms_scaled_linear_glu")
    assert {name: counted.get(name, 0) for name in names} == dict(zip(names, (5, 2, 3), strict=True))
    assert len([m for m in left if m.what == missed.APART]) == 1
    assert error(got, want.double()) <= 3e-2
    torch._dynamo.reset()
    with serving(early="never"):
        assert torch.equal(torch.compile(model, fullgraph=True)(x), got)


def test_a_range_of_rows():
    """One graph for 2 to 32 rows, as vLLM compiles it."""
    model = nn.Sequential(Layer(), Layer())
    inputs = [torch.randn(m, 1024, device=DEVICE, dtype=BF16) for m in (5, 2, 32)]
    with serving(), compile_range(2, 32):
        reset_matches()
        compiled = torch.compile(model, fullgraph=True)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        results = [compiled(x) for x in inputs]
    assert matches()["linear_residual_squares"] == 3
    assert all(error(got, model(x).double()) <= 3e-2 for x, got in zip(inputs, results, strict=True))
