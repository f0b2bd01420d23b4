"""csrc/gemm/linear_gemv.cu on a CPU (emulator.py): tiles, epilogues and norms against float64, and what the emulator says of broken lines."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import csrc
from fp4_inductor.kernels.forms import Epilogue
from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops import linear
from fp4_inductor.ops.linear_epilogue import finish
from fp4_inductor.ops.linear_glu import ACTIVATIONS
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated, linear_fields, tiles_of
from lowering_tests.kernels.test_emulated_epilogue import ACTS, distance, small_weight, z
from lowering_tests.kernels.test_emulated_linear import BF16, FP16, error, weight

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
GEMV = "gemm/linear_gemv.cu"
EARLY = ("codes", "scale", "norm_weight")  # what may be read before the kernel before has ended
OWN, PLAIN = (0, 0, 0, 0), Epilogue()


def run(x, w, bias=None, tile=OWN, then=PLAIN, norm=(None, 0.0, 0.0), library="linear_gemv", arch=90, **more) -> torch.Tensor:
    columns = w[0].shape[0] // (2 if library.endswith("glu") else 1)
    out = torch.full((x.shape[0], columns), float("nan"), dtype=x.dtype)
    epilogue = dict(act=ACTS.index(then.act), mul=then.mul, residual=then.residual)
    normalised = dict(zip(("norm_weight", "eps", "norm_offset"), norm, strict=True))
    fields = dict(linear_fields(x, w, bias, tile, then.starts), **epilogue, **normalised, early=int(arch >= 90))
    return emulated(GEMV, arch, csrc.LIBRARIES[library].defines).run(LinearParams, fields, out, constants=EARLY, **more)


# (rows, warps, k_groups, stages): a stage for all; more warps in K than segments; several stages
TILES = [(4, 16, 1, 1), (4, 16, 2, 2), (2, 16, 4, 3), (2, 8, 8, 5), (4, 4, 2, 8), (2, 4, 1, 2), (4, 12, 6, 2), (4, 4, 2, 2 + 16 * 3), (2, 4, 1, 1 + 16), OWN]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_numbers(tile, arch):
    """N: off every tile, fewer rows than blocks; K: less than a segment, an odd multiple of 64, several segments of which the last one is short."""
    for i, (n, k) in enumerate(((1, 64), (33, 1088), (70, 2048), (131, 4160), (16, 192))):
        for dtype in (BF16, FP16):
            x, w = torch.randn(1, k).to(dtype), weight(n, k)
            bias = torch.randn(n).to(dtype) if i % 2 else None
            y = run(x, w, bias, tile, arch=arch)
            assert error(y, x, w, bias) <= linear.CONTRACT.tolerance[dtype] * (2 if n < 33 else 1), (n, k, dtype)


def test_every_instance_has_a_tile():
    assert {(tile[0],) for tile in TILES if any(tile)} == set(tiles_of(GEMV))


def test_its_own_tile_for_long_rows():
    """Of which less of the weight is in flight; and the longest that is taken."""
    for arch, k in ((120, 32768), (90, 32768), (120, 20480)):
        x, w = torch.randn(1, k).to(BF16), weight(9, k)
        assert error(run(x, w, arch=arch), x, w, None) <= 2 * linear.CONTRACT.tolerance[BF16]


@pytest.mark.parametrize("act", ACTS)
def test_pointwise(act):
    i = ACTS.index(act)
    for tile in (OWN, (2, 8, 2, 2)):
        n, k, dtype = (33, 70, 130, 64, 7)[i % 5], (64, 1088, 2048)[i % 3], (BF16, FP16)[i % 2]
        x, w = torch.randn(1, k).to(dtype), small_weight(n, k)
        bias, mul, residual = (torch.randn(*shape).to(dtype) for shape in ((n,), (1, n), (1, n)))
        bias, mul, residual = bias if i != 1 else None, mul if i not in (0, 3) else None, residual if i != 2 else None
        y = run(x, w, bias, tile, Epilogue((), act, mul, residual), library="linear_gemv_pointwise")
        want = finish(z(x, w, bias), act, None if mul is None else mul.double(), None if residual is None else residual.double())
        assert distance(y, want) <= linear.CONTRACT.tolerance[dtype]


def gate_and_up(x, w, bias, inner):
    q, s, scales = w
    halves = [(q[a : a + inner], s[a : a + inner], scales[i] if scales.dim() else scales) for i, a in enumerate((0, inner))]
    return (z(x, half, None if bias is None else bias[a : a + inner]) for half, a in zip(halves, (0, inner), strict=True))


@pytest.mark.parametrize("arch", [80, 90])
def test_glu(arch):
    for i, (inner, k) in enumerate(((1, 64), (5, 192), (67, 1088), (130, 2112))):
        dtype, act, tile = (BF16, FP16)[i % 2], ACTS[1 + i], ((4, 16, 1, 2), (2, 8, 2, 3), OWN, (4, 8, 4, 1))[i]
        x, (q, s, g) = torch.randn(1, k).to(dtype), small_weight(2 * inner, k)
        bias = torch.randn(2 * inner).to(dtype) if i % 2 else None
        scales, starts = (torch.stack((g, g * 3)), (inner,)) if i != 1 else (g, ())
        y = run(x, (q, s, scales), bias, tile, Epilogue(starts, act), library="linear_gemv_glu", arch=arch)
        gate, up = gate_and_up(x, (q, s, scales), bias, inner)
        assert distance(y, ACTIVATIONS[act](gate) * up) <= linear.CONTRACT.tolerance[dtype] * (3 if inner < 8 else 1), (inner, k, act)


@pytest.mark.parametrize("starts", [(32,), (31, 50)])
def test_several_global_scales(starts):
    (q, s, _), g, x = weight(70, 1088), torch.tensor([0.37, 1.9, 0.02])[: len(starts) + 1], torch.randn(1, 1088).to(BF16)
    y = run(x, (q, s, g), None, OWN, Epilogue(starts))
    for i, (a, b) in enumerate(zip((0, *starts), (*starts, 70), strict=True)):
        assert error(y[:, a:b], x, (q[a:b], s[a:b], g[i]), None) <= 2 * linear.CONTRACT.tolerance[BF16]


def normalised(x, weight, eps, offset):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.float())).to(weight.dtype)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norm(dtype, arch):
    """Of rows of less than a segment, of several, of more than all threads take at once."""
    for i, (n, k, size) in enumerate(((33, 64, 1.0), (70, 1088, 30.0), (40, 5184, 1e-3))):
        x, w, own = (torch.randn(1, k) * size).to(dtype), weight(n, k), torch.randn(k).to(dtype)
        eps, offset = (1e-6, 1e-5, 1e-3)[i], float(i == 1)
        y = run(x, w, None, (OWN, (2, 4, 2, 2), OWN)[i], norm=(own, eps, offset), arch=arch)
        assert error(y, normalised(x, own, eps, offset), w, None) <= linear.CONTRACT.tolerance[dtype] * (2 if n == 33 else 1), (n, k)


def test_norm_ahead_of_gates_and_ups_and_of_a_residual():
    x, own, w = torch.randn(1, 576).to(BF16), torch.randn(576).to(BF16), small_weight(80, 576)
    y = run(x, w, None, OWN, Epilogue((), "silu"), (own, 1e-6, 0.0), "linear_gemv_glu")
    gate, up = gate_and_up(normalised(x, own, 1e-6, 0.0), w, None, 40)
    assert distance(y, ACTIVATIONS["silu"](gate) * up) <= linear.CONTRACT.tolerance[BF16]
    residual = torch.randn(1, 80).to(BF16)
    y = run(x, w, None, OWN, Epilogue((), "", None, residual), (own, 1e-6, 0.0), "linear_gemv_pointwise")
    assert distance(y, z(normalised(x, own, 1e-6, 0.0), w, None) + residual.double()) <= linear.CONTRACT.tolerance[BF16]


def test_activations_of_every_size():
    """Blocks of 16 from 2^-100 to 2^100: each alone, so that the largest does not hide the others, with weights of one row each."""
    for exponent in (-100, -40, -20, 0, 20, 40, 100):
        x, w = torch.randn(1, 128).to(BF16) * 2.0**exponent, (*weight(40, 128)[:2], torch.tensor(2.0**-20))
        assert error(run(x, w), x, w, None) <= linear.CONTRACT.tolerance[BF16] * 2, exponent
    x = torch.randn(1, 1088).to(BF16)
    x[:, :64], x[:, 64:128], x[:, 512:528] = x[:, :64] * 2.0**60, 0, 2.0**-120
    assert error(run(x, w := weight(33, 1088)), x, w, None) <= 2 * linear.CONTRACT.tolerance[BF16]
    for odd in (float("inf"), float("nan")):
        x[0, 700] = odd
        assert not torch.isfinite(run(x, w)).any()


def test_the_order_in_which_threads_run_does_not_matter():
    x, w = torch.randn(1, 2112).to(BF16), weight(70, 2112)
    first = run(x, w, None, (2, 8, 4, 2), seed=1)
    assert all(torch.equal(run(x, w, None, (2, 8, 4, 2), seed=seed), first) for seed in (2, 3))


def test_what_it_refuses():
    def status(words="status 1$", **changed):
        x, w = torch.zeros(changed.pop("m", 1), k := changed.pop("k", 64), dtype=BF16), weight(changed.pop("n", 6), k)
        with pytest.raises(EmulatorError, match=words):
            run(x, w, **changed)

    status(m=2)
    status(k=96)
    status(k=32768 + 64)
    status(n=5, library="linear_gemv_glu")
    status(then=Epilogue((), "silu"))
    for tile in (
        (3, 16, 1, 2),
        (4, 17, 1, 2),
        (4, 16, 3, 2),
        (4, 16, 32, 2),
        (4, 16, 1, 9),
        (4, 16, 1, 16),
        (4, 16, 1, -1),
        (4, 16, 1, 8),
    ):  # the last one: more shared memory than there is
        status("status 9$", tile=tile)


BEFORE = "global memory before the previous kernel"
CAUGHT = [
    ("linear_gemv", "READ_ROWS_PAST_N", f"{BEFORE}|outside every allocation"),
    ("linear_gemv", "READ_K_PAST_K", f"{BEFORE}|outside every allocation"),
    ("linear_gemv", "SKIP_COPY_WAIT", "before its asynchronous copy was waited for"),
    ("linear_gemv", "SKIP_WARP_BARRIER", "race: read of shared"),
    ("linear_gemv", "SKIP_BARRIER_AFTER_X", "race: read of shared|nobody wrote"),
    ("linear_gemv", "SKIP_BARRIER_BEFORE_SUMS", "race: read of shared|nobody wrote"),
    ("linear_gemv", "SKIP_BARRIER_BEFORE_SQUARES", "race: read of shared|nobody wrote"),
    ("linear_gemv", "STORE_BEFORE_PDL_WAIT", f"read of {BEFORE}"),
    ("linear_gemv", "TRIGGER_BEFORE_PDL_WAIT", "before this one has waited"),
    ("linear_gemv_glu", "UP_FROM_GATE_ROWS", None),
    ("linear_gemv_glu", "UP_WITH_GATE_SCALE", None),
]


@pytest.mark.parametrize(("library", "fault", "words"), CAUGHT)
def test_a_broken_line_is_caught(library, fault, words):
    x, (q, s, g), own = torch.randn(1, 1088).to(BF16), small_weight(66, 1088), torch.ones(1088).to(BF16)
    glu = library.endswith("glu")
    w = (q, s, torch.stack((g, g * 3)) if glu else g)
    then = Epilogue((33,), "silu") if glu else Epilogue()
    gate, up = gate_and_up(normalised(x, own, 1e-6, 0.0), w, None, 33)
    want = ACTIVATIONS["silu"](gate) * up if glu else torch.cat((gate, up), 1)
    kernel = emulated(GEMV, 90, csrc.LIBRARIES[library].defines)
    call = lambda: distance(run(x, w, None, (4, 4, 1, 1), then, (own, 1e-6, 0.0), library), want)  # noqa: E731
    assert call() <= linear.CONTRACT.tolerance[BF16]
    emulator.check_caught(kernel, fault, words, call)


@pytest.mark.parametrize("missing", EARLY)
def test_weights_are_fetched_early(missing):
    x, w, own = torch.randn(1, 1088).to(BF16), weight(33, 1088), torch.ones(1088).to(BF16)
    fields = dict(linear_fields(x, w, None, OWN), early=1, norm_weight=own, eps=1e-6)
    with pytest.raises(EmulatorError, match=f"read of {BEFORE}"):
        emulated(GEMV).run(LinearParams, fields, torch.empty(1, 33, dtype=BF16), constants=[name for name in EARLY if name != missing])


def test_scale_bytes_of_every_value():
    """A block of each of the 127 scales: by the conversion of sm_89 and by shifts."""
    s = (torch.arange(64 * 4) % 127).to(torch.uint8).view(64, 4).view(nvfp4.SCALE_DTYPE)
    w, x = (torch.randint(0, 256, (64, 32), dtype=torch.uint8), s, torch.tensor(1.0)), torch.randn(1, 64).to(FP16)
    for arch in (80, 90):
        assert error(run(x, w, arch=arch), x, w, None) <= 2 * linear.CONTRACT.tolerance[FP16]
