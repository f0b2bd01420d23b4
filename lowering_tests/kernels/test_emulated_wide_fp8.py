"""csrc/gemm/linear_wide_fp8.cu on a CPU (emulator.py): the codes of fp4.dequantize_fp8, every tile over tails, and what a broken kernel is caught by."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops import quantize_rows_fp8
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR
from fp4_inductor.ops.dequantize_fp8 import reference as e4m3_weight
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, fp8_tiles, linear_fields
from lowering_tests.kernels.wide_fp8 import NINE, TOLERANCE, Products, one_hot, some, tokens

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "gemm/linear_wide_fp8.cu"
TILES = fp8_tiles()


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def run(x, w, bias, tile, starts: tuple[int, ...] = (), seed: int = 0, kernel: Emulated | None = None) -> torch.Tensor:
    kernel = kernel or emulated(SOURCE, 90, NINE)
    out = torch.full((x[0].shape[0], w[0].shape[0]), float("nan"), dtype=torch.bfloat16)
    return kernel.run(LinearParams, dict(linear_fields(quantize_rows_fp8.in_lane_order(x[0]), w, bias, tile, starts), x_scale=x[1]), out, seed=seed)


PRODUCTS = Products(run, weight, lambda w: e4m3_weight(*w[:2]))
error = PRODUCTS.error


def test_every_code_with_every_scale_is_that_of_the_transient_weight():
    """Each token picks one k, so that a column of the result is the E4M3 weight itself."""
    q = torch.arange(256, dtype=torch.uint8).repeat(127, 1)[:, torch.randperm(256)].contiguous()
    s = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(nvfp4.SCALE_DTYPE)
    for tile, first in (((256, 1), 0), ((256, 2), 256), ((128, 0), 200)):
        y = run(one_hot(tile[0], 512, first), (q, s, torch.tensor(WEIGHT_FACTOR)), None, tile)
        assert torch.equal(y.float(), e4m3_weight(q, s).float()[:, first : first + tile[0]].T), tile


@pytest.mark.parametrize("tile", some(TILES), ids=str)
def test_tiles_and_tails(tile):
    PRODUCTS.check_tails(tile)


def test_it_chooses_a_tile_for_every_size():
    PRODUCTS.check_own_choice()


@pytest.mark.parametrize("tile", [(128, 0), (192, 1), (256, 2)], ids=str)
def test_siblings_have_global_scales_of_their_own(tile):
    """Two and three members in one call, bit for bit what a call each computes where the same steps are summed."""
    for m, starts, n in ((3, (48,), 70), (120, (16, 80), 130), (9, (5, 6), 33)):
        (q, s, _), g = weight(n, 1024), torch.tensor([0.37, 2.9, 0.011])[: len(starts) + 1]
        x, bias = tokens(m, 1024), torch.randn(n).bfloat16()
        y = run(x, (q, s, g), bias, tile, starts)
        for i, (a, b) in enumerate(zip((0, *starts), (*starts, n), strict=True)):
            part = (q[a:b], s[a:b], g[i])
            assert torch.equal(y[:, a:b], run(x, part, bias[a:b], tile))
            assert error(y[:, a:b], x, part, bias[a:b]) <= TOLERANCE


@pytest.mark.parametrize("tile", [(128, 0), (192, 4), (256, 1)], ids=str)
def test_no_order_of_threads_changes_a_bit_and_a_bad_token_spoils_its_own_row_only(tile):
    PRODUCTS.check_order_of_threads_and_neighbours(tile)


def test_arguments_that_it_does_not_take():
    kernel = emulated(SOURCE, 90, NINE)
    for m, n, k, dtype, starts, tile in (
        (0, 8, 256, 0, (0, 0), (256, 1)),
        (1, 0, 256, 0, (0, 0), (256, 1)),
        (1, 8, 192, 0, (0, 0), (256, 1)),
        (1, 8, 256, 1, (0, 0), (256, 1)),
        (1, 8, 256, 0, (9, 8), (256, 1)),
        (1, 8, 256, 0, (0, 0), (32, 1)),
        (1, 8, 256, 0, (0, 0), (256, 2)),  # one step cannot be shared
        (1, 1300, 1024, 0, (0, 0), (256, 4)),  # not all clusters at once
    ):
        with pytest.raises(EmulatorError, match="status"):
            kernel.run(LinearParams, dict(M=m, N=n, K=k, dtype=dtype, second=starts[0], third=starts[1], tile=tile), torch.empty(1))


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
CAUGHT = [
    ("SKIP_WGMMA_WAIT", None),
    ("SKIP_TOKENS_WAIT", "before its asynchronous copy was waited for"),
    ("SKIP_TOKENS_FREE_WAIT", "more arrivals|race"),
    ("OTHER_BLOCK_NOT_TOLD", "deadlock"),
    ("SKIP_WEIGHTS_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("ONE_WARP_FREES_WEIGHTS", "race|more|promise|deadlock"),
    ("BLOCK_ENDS_EARLY", "deadlock|has ended|may still use"),
    ("SKIP_FLAG_WAIT", None),
    ("FLAG_NOT_SET", "deadlock"),
    ("SKIP_SYNC_OF_STAGING", "race|nobody wrote"),
    ("SKIP_TOKEN_SCALES_WAIT", "race|nobody wrote"),
    ("STORE_COLUMNS_PAST_N", "outside every allocation"),
    ("STORE_TOKENS_PAST_M", "outside every allocation"),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    x, w = tokens(70, 2816), weight(264 if "COLUMNS" in fault else 250, 2816)
    tile = (128, 1) if "SCALES" in fault else (128, 2)
    emulator.check_caught(emulated(SOURCE, 90, NINE), fault, words, lambda: error(run(x, w, None, tile), x, w))
