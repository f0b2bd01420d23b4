"""csrc/sparse/sparse_linear_wide.cu on a CPU (emulator.py): every tile against float64 on random and adversarial 2:4 patterns."""

from __future__ import annotations

import pytest
import torch

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
SOURCE = "sparse/sparse_linear_wide.cu"
BF16, FP16 = torch.bfloat16, torch.float16
TILES = emulator.tiles_of(SOURCE)
SHARES = 0  # in place of splits: two blocks share the activations


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    """K of fewer steps than warpgroups take turns, of more than the rings hold; rows and tokens past the end; two tiles of tokens."""
    rows, tokens, k_groups = tile
    for i, (m, n, k, splits) in enumerate((
        (tokens - 7, rows - 3, 256, 1),
        (tokens, rows + 7, 256 * (2 * k_groups + 1), SHARES),
        (tokens + 5, 2, 1280, 4),
        (3, 2 * rows + 1, 1536, SHARES),
        (tokens // 2 + 1, 33, 256 * (6 if tokens == 128 else 27), 2),
    )):  # fmt: skip
        check(SOURCE, m, n, k, (*tile, splits), (BF16, FP16)[(i + k_groups) % 2])


def test_its_own_choice_of_tile():
    for m, n, k in ((1, 33, 256), (17, 4300, 256), (40, 70, 1024), (65, 8500, 256), (128, 100, 768), (130, 8449, 256)):
        check(SOURCE, m, n, k, (0, 0, 0, 0), BF16)


@pytest.mark.parametrize("nibble", LEGAL.tolist())
def test_one_pattern_everywhere(nibble):
    check(SOURCE, 3, 17, 512, (64, 16, 4, 1), FP16, weight(17, 512, torch.full((17, 128), nibble, dtype=torch.uint8)))


def test_a_single_kept_value_at_every_place():
    for tile, dtype in (((64, 32, 4, 2), BF16), ((128, 64, 2, SHARES), FP16)):
        x = torch.randn(20, 512).to(dtype)
        assert torch.equal(run(emulated(SOURCE), x, picks(512), None, tile), x)


def test_every_code_with_every_scale():
    check_every_code_with_every_scale(lambda x, w: run(emulated(SOURCE), x, w, None, (64, 16, 4, 1)))


@pytest.mark.parametrize("splits", [2, SHARES])
def test_order_of_threads_and_neighbouring_rows_change_nothing(splits):
    check_order_of_threads_and_neighbours(
        lambda x, w, seed=0: run(emulated(SOURCE), x, w, None, (64, 32, 4, splits), seed), torch.randn(20, 2304).to(BF16), weight(70, 2304)
    )


def test_a_global_scale_for_each_of_up_to_three_layers():
    check_several_scales(SOURCE, (64, 32, 4, 1), ((3, 70, 512), (20, 133, 256)))


def test_arguments_that_no_kernel_takes():
    for m, n, k, tile in (
        (0, 8, 256, (0,) * 4),
        (1, 0, 256, (0,) * 4),
        (1, 8, 128, (0,) * 4),
        (1, 8, 320, (0,) * 4),
        (1, 8, 256, (64, 16, 4, 2)),  # one step cannot be shared
        (1, 8, 1024, (64, 16, 4, 3)),
        (1, 8, 1024, (64, 16, 4, -1)),
        (1, 8, 256, (64, 16, 2, 1)),
    ):
        with pytest.raises(EmulatorError, match="status"):
            emulated(SOURCE).run(LinearParams, dict(M=m, N=n, K=k, tile=tile), torch.empty(1))


@pytest.mark.parametrize("tile", [(64, 16, 4, SHARES), (128, 32, 2, 2), (64, 64, 2, 1)], ids=str)
def test_begun_early_only_the_weight_is_read_before_the_kernel_before_has_ended(tile):
    x, w, bias = torch.randn(20, 4096).to(BF16), weight(97, 4096), torch.randn(97).to(BF16)
    assert torch.equal(run(emulated(SOURCE), x, w, bias, tile, early=True), run(emulated(SOURCE), x, w, bias, tile))


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
EARLY = "global memory before the previous"
CAUGHT = [
    ("FETCH_BEFORE_PDL_WAIT", f"read of {EARLY}"),
    ("STORE_BEFORE_PDL_WAIT", f"(read|write) of {EARLY}"),
    ("SKIP_WEIGHTS_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("SKIP_TOKENS_WAIT", "before its asynchronous copy was waited for"),
    ("FREE_WEIGHTS_EARLY", "race|more arrivals"),
    ("ZERO_METADATA_PAST_N", "metadata 0 is not ordered"),
    ("EXCHANGE_METADATA_HALVES", None),
    ("METADATA_OF_OTHER_HALF", None),
    ("SKIP_SWIZZLE", None),
    ("OTHER_BLOCK_NOT_TOLD", "deadlock"),
    ("COPY_TO_OWN_BLOCK_ONLY", "deadlock"),
    ("OTHER_READERS_NOT_COUNTED", "race|more arrivals"),
    ("BARRIERS_UNKNOWN_TO_CLUSTER", "nobody has set up"),
    ("BLOCK_ENDS_EARLY", "block ended while|which has ended|nobody has set up"),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    check_caught(SOURCE, fault, words, (*TILES[0], SHARES), (12, 97, 8192), early=True)
