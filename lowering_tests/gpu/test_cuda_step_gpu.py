"""cuda_step_attention on a GPU: fp4.cached_attention over a bfloat16 cache by clusters, against float64 on fresh data; replays; a model's step."""

from __future__ import annotations

import itertools

import pytest
import torch

import fp4_inductor
from fp4_inductor.kernels.cached_attention import cuda_step
from lowering_tests.gpu.helpers import BF16, FP16
from lowering_tests.gpu.test_attention_step_gpu import NAN, SHAPES, call, check, fresh

pytestmark = pytest.mark.gpu
STEPS = [shape for shape in SHAPES if shape[3] == 1 and shape[5] in cuda_step.WIDTHS]


@pytest.fixture(autouse=True)
def _on():
    with fp4_inductor.dispatch(candidates=(cuda_step.NAME,)):
        yield


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_shapes(shape):
    for dtype, prologue in itertools.product((BF16, FP16), ("", "norm", "norm half each")):
        check(call(*shape, dtype=dtype, prologue=prologue), cuda_step.step)


@pytest.mark.parametrize("tile", [(2, 1), (4, 1), (4, 4), (8, 2), (8, 8), (4, 16)])
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
