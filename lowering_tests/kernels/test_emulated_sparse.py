"""csrc/sparse/sparse_linear_small.cu on a CPU (emulator.py): every tile against float64 on random and adversarial 2:4 patterns."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels import registry
from fp4_inductor.kernels.params import LinearParams
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated
from lowering_tests.kernels.sparse24 import (
    LEGAL,
    check,
    check_caught,
    check_every_code_with_every_scale,
    check_order_of_threads_and_neighbours,
    check_several_scales,
    picks,
    run,
    weight,
)

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "sparse/sparse_linear_small.cu"
BF16, FP16 = torch.bfloat16, torch.float16
TILES = emulator.tiles_of(SOURCE)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    most = 8 * tile[0]
    for i, (n, k, splits) in enumerate(((1, 64, 1), (33, 192, 2), (70, 4160, 1), (64, 2112, 4))):
        for m in (max(1, most - 7), most - 2, most):
            check(SOURCE, m, n, k, (*tile[1:], splits), (BF16, FP16)[(i + m) % 2])


@pytest.mark.parametrize("k", [32, 96, 160, 1056, 4128])
def test_k_that_is_a_multiple_of_32_only(k):
    for i, (m, n, splits) in enumerate(((1, 1, 1), (8, 33, 2), (13, 70, 1), (31, 64, 4))):
        check(SOURCE, m, n, k, (2, 8, 2, splits), (BF16, FP16)[i % 2])


def test_its_own_choice_of_tile():
    for m, n, k in ((1, 8200, 64), (16, 8192, 64), (1, 40, 2048), (9, 40, 8192), (17, 40, 192), (32, 31, 64)):
        check(SOURCE, m, n, k, (0, 0, 0, 0), BF16)


def test_a_global_scale_for_each_of_up_to_three_layers():
    check_several_scales(SOURCE, (2, 8, 2, 1), ((3, 70, 192), (8, 33, 96), (13, 130, 160)))


@pytest.mark.parametrize("nibble", LEGAL.tolist())
def test_one_pattern_everywhere(nibble):
    check(SOURCE, 3, 17, 256, (2, 8, 2, 1), FP16, weight(17, 256, torch.full((17, 64), nibble, dtype=torch.uint8)))


def test_a_single_kept_value_at_every_place():
    x = torch.randn(8, 256).to(BF16)
    assert torch.equal(run(emulated(SOURCE), x, picks(256), None, (4, 8, 3, 2)), x)


def test_every_code_with_every_scale():
    check_every_code_with_every_scale(lambda x, w: run(emulated(SOURCE), x, w, None, (2, 16, 2, 1)))


def test_order_of_threads_and_neighbouring_rows_change_nothing():
    check_order_of_threads_and_neighbours(
        lambda x, w, seed=0: run(emulated(SOURCE), x, w, None, (2, 8, 3, 2), seed), torch.randn(13, 1088).to(BF16), weight(70, 1088)
    )


def test_arguments_that_no_kernel_takes():
    for m, n, k, tile in ((0, 8, 64, (0,) * 4), (33, 8, 64, (0,) * 4), (1, 8, 80, (0,) * 4), (1, 8, 64, (2, 8, 2, 3)), (1, 8, 64, (9, 8, 2, 1))):
        with pytest.raises(EmulatorError, match="status"):
            emulated(SOURCE).run(LinearParams, dict(M=m, N=n, K=k, tile=tile), torch.empty(1))
    assert registry.named("sparse_linear")["cuda_sparse_small"].k_multiple == 32


CAUGHT = [
    ("SKIP_COPY_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("SKIP_SYNC_BEFORE_REFILL", "race: write"),
    ("SCALES_OF_EVEN_ROWS", None),
    ("READ_SCALES_PAST_END", "outside every allocation"),
    ("READ_METADATA_PAST_K", "outside every allocation"),
    ("EXCHANGE_METADATA_HALVES", None),
    ("SKIP_SWIZZLE", None),
    ("SKIP_CLUSTER_BARRIER_BEFORE_SUMS", "race|nobody wrote"),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    tile = (2, 8, 2, 2 if "CLUSTER" in fault else 1)  # one block: three steps a warp
    check_caught(SOURCE, fault, words, tile, (8, 33, 2080 if "SCALES" in fault else 2112))
