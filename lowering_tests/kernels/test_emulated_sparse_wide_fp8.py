"""csrc/sparse/sparse_linear_wide_fp8.cu on a CPU (emulator.py): the codes of fp4.sparse_dequantize_fp8, every tile over tails, and what a broken kernel is
caught by. What it shares with gemm/linear_wide_fp8.cu is tested there."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, fp8_tiles, linear_fields
from lowering_tests.kernels.sparse24 import LEGAL, WEIGHT, picks, weight
from lowering_tests.kernels.wide_fp8 import NINE, TOLERANCE, Products, one_hot, some, tokens

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "sparse/sparse_linear_wide_fp8.cu"
TILES = fp8_tiles()


def run(x, w, bias, tile, seed: int = 0, kernel: Emulated | None = None, early: bool = False, starts: tuple[int, ...] = ()) -> torch.Tensor:
    kernel = kernel or emulated(SOURCE, 90, NINE)
    out = torch.full((x[0].shape[0], w[0].shape[0]), float("nan"), dtype=torch.bfloat16)
    given = dict(linear_fields(x[0], w, bias, tile, starts), x_scale=x[1], early=int(early))
    return kernel.run(LinearParams, given, out, seed=seed, constants=WEIGHT if early else ())


def e4m3_weight(w) -> torch.Tensor:
    return torch.ops.fp4.sparse_dequantize_fp8(*w[:3]).float()


PRODUCTS = Products(run, weight, e4m3_weight, zeros=False)
error = PRODUCTS.error


def test_every_code_with_every_scale_in_every_pattern_is_that_of_the_transient_weight():
    values = torch.arange(256, dtype=torch.uint8).repeat(127, 1)[:, torch.randperm(256)].contiguous()
    scale = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 64).contiguous().view(torch.float8_e4m3fn)
    meta = LEGAL[torch.randint(0, 6, (127, 128))] | LEGAL[torch.randint(0, 6, (127, 128))] << 4
    w = (values, meta, scale, torch.tensor(WEIGHT_FACTOR))
    for tile, first in (((256, 1), 0), ((256, 2), 512), ((256, 0), 256), ((128, 0), 896)):
        y = run(one_hot(tile[0], 1024, first), w, None, tile)
        assert torch.equal(y.float(), e4m3_weight(w)[:, first : first + tile[0]].T), tile


@pytest.mark.parametrize("tile", some(TILES), ids=str)
def test_tiles_and_tails(tile):
    PRODUCTS.check_tails(tile)


def test_it_chooses_a_tile_for_every_size():
    PRODUCTS.check_own_choice()


@pytest.mark.parametrize("nibble", LEGAL.tolist())
def test_one_pattern_everywhere(nibble):
    x, w = tokens(40, 512), weight(17, 512, torch.full((17, 128), nibble, dtype=torch.uint8))
    assert error(run(x, w, None, (64, 1)), x, w) <= TOLERANCE


def test_a_single_kept_value_at_every_place():
    x, w = tokens(20, 512), picks(512)
    y = run((x[0], torch.ones(20, 1)), (*w[:3], torch.tensor(1.0)), None, (64, 1))
    assert torch.equal(y.float(), x[0].float())


@pytest.mark.parametrize("tile", [(128, 0), (192, 4), (256, 1)], ids=str)
def test_no_order_of_threads_changes_a_bit_and_a_bad_token_spoils_its_own_row_only(tile):
    PRODUCTS.check_order_of_threads_and_neighbours(tile)


@pytest.mark.parametrize("tile", [(64, 0), (128, 2), (64, 1)], ids=str)
def test_begun_early_only_the_weight_is_read_before_the_kernel_before_has_ended(tile):
    x, w, bias = tokens(20, 1024), weight(97, 1024), torch.randn(97).bfloat16()
    assert torch.equal(run(x, w, bias, tile, early=True), run(x, w, bias, tile))


def test_a_global_scale_for_each_of_up_to_three_layers():
    for (m, n, k), starts, tile in (((20, 70, 512), (33,), (64, 1)), ((130, 290, 1024), (16, 289), (128, 0)), ((5, 40, 512), (8, 24), (64, 2))):
        x, (*packed, _), bias, g = tokens(m, k), weight(n, k), torch.randn(n).bfloat16(), torch.tensor([0.37, 2.9, 0.011])
        y = run(x, (*packed, g), bias, tile, starts=starts)
        for scale, a, b in zip(g, (0, *starts), (*starts, n), strict=False):
            own = slice(a, b)
            assert error(y[:, own], x, (*(p[own] for p in packed), scale), bias[own]) <= TOLERANCE, (m, n, k, starts)


def test_arguments_that_it_does_not_take():
    kernel = emulated(SOURCE, 90, NINE)
    for m, n, k, dtype, tile in (
        (0, 8, 256, 0, (256, 1)),
        (1, 0, 256, 0, (256, 1)),
        (1, 8, 192, 0, (256, 1)),
        (1, 8, 256, 1, (256, 1)),
        (1, 8, 256, 0, (32, 1)),
        (1, 8, 256, 0, (256, 2)),  # one step cannot be shared
        (1, 1300, 1024, 0, (256, 4)),  # not all clusters at once
    ):
        with pytest.raises(EmulatorError, match="status"):
            kernel.run(LinearParams, dict(M=m, N=n, K=k, dtype=dtype, tile=tile), torch.empty(1))


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
CAUGHT = [
    ("ZERO_METADATA_PAST_N", "metadata 0 is not ordered"),
    ("METADATA_OF_OTHER_HALF", None),
    ("METADATA_OF_OTHER_ROW", None),
    ("SKIP_SWIZZLE", None),
    ("SKIP_METADATA_SWIZZLE", None),
    ("SCALES_OF_OTHER_HALF", None),
    ("LOSE_A_SIGN", None),
    ("TOKENS_OF_OTHER_HALF", None),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    x, w = tokens(40, 512), weight(100, 512)
    emulator.check_caught(emulated(SOURCE, 90, NINE), fault, words, lambda: error(run(x, w, None, (64, 1)), x, w), 0.02)
