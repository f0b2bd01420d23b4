"""What CUDA kernels do behind their products, on a CPU (emulator.py): activation, product, residual, act(gate) * up."""

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
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, linear_fields
from lowering_tests.kernels.test_emulated_linear import BF16, FP16, weight

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
ACTS = ["", *ACTIVATIONS]
TILES = {"linear_small": (2, 16, 2), "linear_table": (2, 2, 4, 1), "linear_wide": (128, 32, 2, 1)}
OTHER_TILES = {"linear_small": (4, 8, 2), "linear_table": (6, 1, 2, 1), "linear_wide": (128, 64, 2, 1)}


def run(kernel: Emulated, x, w, bias, tile, then: Epilogue, columns: int) -> torch.Tensor:
    out = torch.full((x.shape[0], columns), float("nan"), dtype=x.dtype)
    given = linear_fields(x, w, bias, tile, then.starts)
    return kernel.run(LinearParams, dict(given, act=ACTS.index(then.act), mul=then.mul, residual=then.residual), out)


def library(name: str) -> Emulated:
    return emulated(csrc.LIBRARIES[name].source, 90, csrc.LIBRARIES[name].defines)


def z(x, w, bias):
    y = x.double() @ nvfp4.dequantize(*w, torch.float32).double().T
    return y if bias is None else y + bias.double()


def small_weight(n, k):
    """Results of size one, where activations bend."""
    return weight(n, k)[0], (torch.rand(n, k // 16) * 0.9 + 0.1).to(nvfp4.SCALE_DTYPE), torch.tensor(1.0 / k**0.5)


def distance(y, r) -> float:
    d = ((y.double() - r).norm() / r.norm()).item()
    return d if d == d else float("inf")


@pytest.mark.parametrize("name", TILES)
def test_pointwise(name):
    kernel = library(f"{name}_pointwise")
    for i, act in enumerate(ACTS):
        few, k = name in ("linear_small", "linear_table"), 768 if name == "linear_table" else 576
        m, n, dtype = (3, 16, 1, 5, 32 if name == "linear_table" else 9)[i] if few else (3, 16, 17, 5, 30)[i], (33, 64, 130, 70, 128)[i], (BF16, FP16)[i % 2]
        x, w = torch.randn(m, k).to(dtype), small_weight(n, k)
        bias, mul, residual = (torch.randn(*shape).to(dtype) for shape in ((n,), (m, n), (m, n)))
        bias, mul, residual = bias if i != 1 else None, mul if i not in (0, 3) else None, residual if i != 2 else None
        tile = (TILES, OTHER_TILES)[i % 2][name]
        y = run(kernel, x, w, bias, tile, Epilogue((), act, mul, residual), n)
        want = finish(z(x, w, bias), act, None if mul is None else mul.double(), None if residual is None else residual.double())
        assert distance(y, want) <= linear.CONTRACT.tolerance[dtype], (act, m, n)


@pytest.mark.parametrize("name", TILES)
def test_glu(name):
    kernel = library(f"{name}_glu")
    # I: less than half a block, off the tile, several blocks; K: a step and a half, more than all warps take at once
    for i, (inner, k) in enumerate(((5, 192), (16, 64), (67, 1088), (130, 576))):
        m, dtype, act = (1, 7, 16, 30 if name == "linear_table" else 9)[i], (BF16, FP16)[i % 2], ACTS[1 + i]
        k = -(-k // 256) * 256 if name == "linear_table" else k
        x, (q, s, g) = torch.randn(m, k).to(dtype), small_weight(2 * inner, k)
        bias = torch.randn(2 * inner).to(dtype) if i % 2 else None
        scales, starts = (torch.stack((g, g * 3)), (inner,)) if i != 1 else (g, ())
        y = run(kernel, x, (q, s, scales), bias, (TILES, OTHER_TILES)[i % 2][name], Epilogue(starts, act), inner)
        halves = [(q[a : a + inner], s[a : a + inner], scales[j if starts else ...]) for j, a in enumerate((0, inner))]
        gate, up = (z(x, w, None if bias is None else bias[a : a + inner]) for w, a in zip(halves, (0, inner), strict=True))
        assert distance(y, ACTIVATIONS[act](gate) * up) <= linear.CONTRACT.tolerance[dtype], (m, inner, k, act)


def test_glu_in_every_tile():
    kernel = library("linear_small_glu")
    for tile, m in (((2, 16, 2), 20), ((4, 8, 2), 32), ((4, 8, 3), 8), ((2, 8, 4), 24), ((4, 4, 3), 17)):
        x, w = torch.randn(m, 320).to(BF16), small_weight(2 * 40, 320)
        y = run(kernel, x, w, None, tile, Epilogue((), "silu"), 40)
        gate, up = z(x, w, None).split(40, 1)
        assert distance(y, ACTIVATIONS["silu"](gate) * up) <= linear.CONTRACT.tolerance[BF16], tile
    x, w = torch.randn(5, 80).to(BF16), small_weight(2 * 19, 80)  # K % 64 != 0
    gate, up = z(x, w, None).split(19, 1)
    y = run(kernel, x, w, None, (2, 16, 2), Epilogue((), "relu"), 19)
    assert distance(y, ACTIVATIONS["relu"](gate) * up) <= linear.CONTRACT.tolerance[BF16]


def test_glu_where_tile_maps_take_both_halves():
    kernel = library("linear_wide_glu")
    for tile, m, inner in (((64, 32, 4, 2), 5, 70), ((128, 64, 2, 1), 66, 64), ((64, 128, 2, 2), 100, 33), ((128, 128, 1, 1), 20, 130), ((0, 0, 0, 0), 9, 200)):
        x, w = torch.randn(m, 512).to(BF16), small_weight(2 * inner, 512)
        y = run(kernel, x, w, None, tile, Epilogue((), "silu"), inner)
        gate, up = z(x, w, None).split(inner, 1)
        assert distance(y, ACTIVATIONS["silu"](gate) * up) <= linear.CONTRACT.tolerance[BF16], tile


@pytest.mark.parametrize("act", ACTS)
def test_activations_at_their_ends(act):
    """Huge, tiny, infinite and not-a-number sums: what float32 arithmetic of the same formula gives."""
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 100.0, -100.0, 3e4, -3e4, float("inf"), float("-inf"), float("nan")]).to(BF16)
    n = len(ends)
    w = (torch.zeros(n, 32, dtype=torch.uint8), torch.zeros(n, 4).to(nvfp4.SCALE_DTYPE), torch.tensor(1.0))
    y = run(library("linear_small_pointwise"), torch.zeros(1, 64, dtype=BF16), w, ends, (2, 16, 2), Epilogue((), act), n)
    want = finish(ends.double(), act, None, None)
    keep = ends.abs() != float("inf") if act in ("silu", "gelu", "gelu_tanh") else torch.ones(n, dtype=torch.bool)  # torch gives NaN for 0 * inf
    assert torch.allclose(y[0].double()[keep], want[keep], rtol=2**-7, atol=1e-30, equal_nan=True), (y, want)


def test_arguments_that_a_library_does_not_take():
    x, w = torch.zeros(1, 64, dtype=BF16), weight(6, 64)
    for name, then in (
        ("linear_small", Epilogue((), "silu")),
        ("linear_small", Epilogue((), "", None, torch.zeros(1, 6, dtype=BF16))),
        ("linear_small_glu", Epilogue((), "silu", torch.zeros(1, 3, dtype=BF16))),
    ):
        with pytest.raises(EmulatorError, match="status 1"):
            run(library(name), x, w, None, (2, 16, 2), then, 6)
    with pytest.raises(EmulatorError, match="status 1"):
        run(library("linear_small_glu"), x, weight(5, 64), None, (2, 16, 2), Epilogue((), "silu"), 2)


@pytest.mark.parametrize("fault", ["UP_FROM_GATE_ROWS", "UP_WITH_GATE_SCALE", "SECOND_HALF_TOO_FAR"])
def test_a_broken_epilogue_is_caught(fault):
    kernel = library("linear_small_glu")
    x, (q, s, g) = torch.randn(4, 64).to(BF16), small_weight(80, 64)
    w = (q, s, torch.stack((g, g * 3)))
    gate, up = (z(x, (q[a : a + 40], s[a : a + 40], w[2][i]), None) for i, a in enumerate((0, 40)))
    want = ACTIVATIONS["silu"](gate) * up
    emulator.check_caught(kernel, fault, None, lambda: distance(run(kernel, x, w, None, (2, 16, 2), Epilogue((40,), "silu"), 40), want))
