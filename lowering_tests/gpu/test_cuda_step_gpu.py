"""cuda_step_attention on a GPU: fp4.cached_attention over a bfloat16 cache by clusters, against float64 on fresh data; replays; a model's step."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from fp4_inductor.kernels.cached_attention import cuda_step
from lowering_tests.gpu import test_quantized_attention_gpu as codes
from lowering_tests.gpu.helpers import BF16, FP16
from lowering_tests.gpu.test_attention_step_gpu import NAN, SHAPES, call, check, check_replays, fresh

pytestmark = pytest.mark.gpu
STEPS = [shape for shape in SHAPES if shape[3] == 1 and shape[5] in cuda_step.WIDTHS]


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_shapes(shape):
    for dtype, prologue in itertools.product((BF16, FP16), ("", "norm", "norm half each")):
        check(call(*shape, dtype=dtype, prologue=prologue), cuda_step.step)


@pytest.mark.parametrize("tile", [(1, 4), (2, 3), (4, 4), (6, 4), (7, 3), (8, 3), (13, 4), (16, 3), (16, 4)], ids=str)
def test_tiles(tile):
    for at in (0, 15, 16, 300, 2000):
        check(call(1, 32, 8, 1, 2100, 128, at, prologue="norm"), lambda c: cuda_step.step(c, tile))


@pytest.mark.parametrize("at", [1, 17, 1000, 4095, 33000, 70000])
def test_lengths(at):
    check(call(1, 32, 4, 1, at + 1, 128, at, prologue="norm"), cuda_step.step)
    check(call(3, 8, 8, 1, at + 7, 64, at, sinks=True, softcap=20.0), cuda_step.step)


def test_masks_and_rings():
    for at, window in ((5, None), (700, None), (700, 128), (5000, 128)):
        check(call(4, 16, 2, 1, 136 if window else 800, 128, at, window, padded=not window, sinks=True), cuda_step.step)


def test_nan_stays_in_its_head_and_sequence():
    c = call(2, 32, 8, 1, 600, 128, 500)
    c.values[1, 3, 17] = NAN
    got = cuda_step.step(c)
    assert got[1, 0, 12:16].isnan().all()
    got[1, 0, 12:16] = 0
    assert got.isfinite().all()


def test_a_thousand_replays_are_bit_equal():
    c = call(8, 32, 8, 1, 4104, 128, 4000, prologue="norm")
    want = cuda_step.step(fresh(c))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cuda_step.step(c)
    for _ in range(1000):
        graph.replay()
        assert torch.equal(got, want)


# --- a cache in fp8 or k8v4 ------------------------------------------------------------------------------------------

CODED = [
    # (B, H, Hkv, Q, S, D, position, window)
    (1, 32, 8, 1, 520, 128, 519, None), (1, 32, 8, 1, 520, 128, 0, None), (1, 32, 8, 1, 4104, 128, 520, None), (8, 32, 8, 1, 520, 128, 66, None),
    (3, 8, 1, 1, 304, 64, 257, None), (1, 64, 8, 1, 256, 64, 5000, 128), (2, 8, 4, 1, 136, 128, 777, 128), (1, 28, 4, 1, 20000, 128, 19998, None),
    (40, 32, 8, 1, 1000, 128, 999, None), (2, 64, 4, 1, 8192, 128, 8000, None),
]  # fmt: skip


@pytest.mark.parametrize("name", cuda_step.FORMATS)
@pytest.mark.parametrize("shape", CODED, ids=str)
def test_codes(shape, name):
    for options in ({}, dict(prologue=True), dict(prologue=True, early=True), dict(softcap=3.0, sinks=True), dict(padded=True)):
        c = codes.call(name, *shape, **options)
        torch.cuda.synchronize()  # what was written is there for a call that is early
        codes.check(c, run=lambda c: (torch.cuda.synchronize(), cuda_step.step(c))[1])
    codes.check(codes.call(name, *shape, dtype=FP16), run=cuda_step.step)


@pytest.mark.parametrize("name", cuda_step.FORMATS)
@pytest.mark.parametrize("tile", [(1, 7), (2, 3), (4, 7), (6, 7), (7, 3), (8, 3), (16, 3), (16, 7)], ids=str)
def test_tiles_of_codes(tile, name):
    for at in (0, 1, 15, 16, 17, 300, 2103):
        codes.check(codes.call(name, 2, 32, 8, 1, 2104, 128, at, prologue=True), run=lambda c: cuda_step.step(c, tile))


@pytest.mark.parametrize("name", cuda_step.FORMATS)
def test_the_op_calls_it(name):
    c = codes.call(name, 32, 32, 8, 1, 8192, 128, 300, prologue=True)
    with mock.patch.object(cuda_step, "fields", wraps=cuda_step.fields) as asked:
        torch.ops.fp4.cached_attention(*c.flat())
    assert asked.called


def test_a_thousand_replays_of_codes():
    check_replays([codes.call("k8v4", 1, 32, 8, 1, 2048, 128, 700, prologue=True) for _ in range(12)], cuda_step.step)
