"""csrc/sparse/sparse_linear_table.cu on a CPU (emulator.py): tiles against float64 on random and adversarial 2:4 patterns."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels.params import LinearParams
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated
from lowering_tests.kernels.sparse24 import (
    LEGAL,
    WEIGHT,
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
SOURCE = "sparse/sparse_linear_table.cu"
BF16, FP16 = torch.bfloat16, torch.float16
# (sets, sets_a_warp, k_groups, substeps): one warp; more warps in K than stages; rings that are no multiple of them; every warp; two warps a step; every
# instance of the kernel
TILES = [
    (1, 1, 1, 2),
    (3, 1, 5, 2),
    (2, 2, 16, 2),
    (16, 2, 2, 2),
    (4, 4, 3, 2),
    (8, 4, 4, 2),
    (2, 1, 6, 4),
    (4, 2, 4, 4),
    (14, 2, 2, 4),
    (4, 4, 8, 4),
    (8, 4, 4, 4),
]


def test_every_instance_of_the_kernel_has_a_tile():
    assert {(sets, substeps) for _, sets, _, substeps in TILES} == set(emulator.tiles_of(SOURCE))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile):
    """M: each number of rows of x that is fetched; N: what one block has, one more, odd; K: one step, fewer than warps, more than the ring holds."""
    rows, step = 16 * tile[0], 128 * tile[3]
    for i, (m, n, steps) in enumerate(
        ((1, rows, 1), (8, rows + 1, 9), (16, 2 * rows + 5, 3), (9, rows + 16, 17), (3, rows + 3, 5), (2, rows + 2, 5), (1, rows + 1, 9))
    ):
        check(SOURCE, m, n, steps * step, tile, (BF16, FP16)[i % 2])


def test_its_own_choice_of_tile():
    for m, n, k in ((1, 16, 256), (2, 4100, 512), (8, 70, 4096), (13, 2114, 768), (3, 17, 1280)):
        check(SOURCE, m, n, k, (0, 0, 0, 0), BF16)


@pytest.mark.parametrize("nibble", LEGAL.tolist())
def test_one_pattern_everywhere(nibble):
    for tile in ((1, 1, 1, 2), (1, 1, 2, 4)):
        check(SOURCE, 3, 17, 512, tile, FP16, weight(17, 512, torch.full((17, 128), nibble, dtype=torch.uint8)))


@pytest.mark.parametrize("tile", [(2, 2, 2, 2), (2, 2, 2, 4), (4, 4, 1, 2)], ids=str)
def test_a_single_kept_value_at_every_place(tile):
    x = torch.randn(9, 1024).to(BF16)
    assert torch.equal(run(emulated(SOURCE), x, picks(1024), None, tile), x)


def test_every_code_with_every_scale():
    check_every_code_with_every_scale(lambda x, w: run(emulated(SOURCE), x, w, None, (2, 2, 3, 2)))


def test_order_of_threads_rows_and_their_number_change_nothing():
    def product(x, w, seed=0):
        return run(emulated(SOURCE), x, w, None, (0, 0, 0, 0), seed)

    x, w = torch.randn(13, 1280).to(BF16), weight(71, 1280)
    y = check_order_of_threads_and_neighbours(product, x, w)
    for m in (1, 3, 8):
        assert torch.equal(product(x[:m].clone(), w), y[:m]), "one order of summation for 1 to 16 rows"


def test_a_global_scale_for_each_of_up_to_three_layers():
    check_several_scales(SOURCE, (0, 0, 0, 0), ((3, 70, 512), (8, 33, 256), (13, 130, 512)))


def test_arguments_that_no_kernel_takes():
    one = (1, 1, 1, 2)
    for m, n, k, tile in (
        *((m, n, k, (0,) * 4) for m, n, k in ((0, 16, 256), (17, 16, 256), (1, 15, 256), (1, 16, 0), (1, 16, 320))),
        (1, 16, 256, (2, 2, 1, 2)),  # more rows than there are
        (1, 16, 256, (1, 1, 2, 4)),  # a step longer than K
        (1, 16, 512, (1, 1, 3, 4)),  # half of a step left to nobody
        *((1, 512, 256, tile) for tile in ((17, 1, 1, 2), (3, 2, 1, 2), (2, 1, 9, 2), (4, 4, 9, 2), (1, 1, 0, 2), (4, 4, 1, 4), (1, 1, 1, 3))),
    ):
        with pytest.raises(EmulatorError, match="status"):
            emulated(SOURCE).run(LinearParams, dict(M=m, N=n, K=k, tile=tile), torch.empty(1))
    check(SOURCE, 1, 16, 256, one, BF16)


@pytest.mark.parametrize("tile", [(0, 0, 0, 0), (2, 1, 4, 4), (1, 1, 5, 2)], ids=str)
def test_begun_early_only_the_weight_is_read_before_the_kernel_before_has_ended(tile):
    for m, n, k in ((1, 70, 1024), (9, 33, 4608)):
        x, w, bias = torch.randn(m, k).to(BF16), weight(n, k), torch.randn(n).to(BF16)
        y = run(emulated(SOURCE), x, w, bias, tile, early=True)
        assert torch.equal(y, run(emulated(SOURCE), x, w, bias, tile))


@pytest.mark.parametrize("part", WEIGHT)
def test_every_part_of_the_weight_is_fetched_early(part):
    x, w = torch.randn(1, 1024).to(BF16), weight(70, 1024)
    with pytest.raises(EmulatorError, match="read of global memory before the previous kernel"):
        run(emulated(SOURCE), x, w, None, (1, 1, 2, 2), early=True, constants=[name for name in WEIGHT if name != part])


EARLY = "global memory before the previous"
CAUGHT = [
    ("FETCH_BEFORE_PDL_WAIT", f"read of {EARLY}"),
    ("STORE_BEFORE_PDL_WAIT", f"(read|write) of {EARLY}"),
    ("TRIGGER_BEFORE_PDL_WAIT", "before this one has waited"),
    ("SKIP_FULL_WAIT", "before its asynchronous copy|nobody wrote|race"),
    ("SKIP_FREE_WAIT", "race|nobody waited for|promise"),
    ("SKIP_BARRIER_AFTER_TABLE", "race|nobody wrote"),
    ("EXPECT_NO_METADATA", "promise|more bytes|race|nobody|outside"),
    ("EXCHANGE_METADATA_HALVES", None),
    ("METADATA_FROM_OTHER_PAIR", None),
    ("BOTH_TAKE_FIRST_HALF", None),
    ("ONE_OF_TWO_WARPS_FREES", "race|more arrivals|deadlock"),
    ("SWIZZLE_OF_ANOTHER_ROW", None),
    ("SKIP_SWIZZLE", None),
    ("SWIZZLE_OF_ANOTHER_PLANE", None),
    ("READ_ROWS_PAST_N", "is not ordered"),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    tile = (1, 1, 6, 4) if fault in ("BOTH_TAKE_FIRST_HALF", "ONE_OF_TWO_WARPS_FREES") else (1, 1, 3, 2)
    check_caught(SOURCE, fault, words, tile, (3 if "PLANE" in fault else 8, 33, 8192), early=True)
