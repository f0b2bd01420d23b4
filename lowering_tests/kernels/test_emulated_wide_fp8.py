"""csrc/gemm/linear_wide_fp8.cu on a CPU (emulator.py): the codes of fp4.dequantize_fp8, every tile over tails, and what a broken kernel is caught by."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import quantize_rows_fp8
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR
from fp4_inductor.ops.dequantize_fp8 import reference as e4m3_weight
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, tiles_of
from lowering_tests.kernels.wide_fp8 import NINE, TOLERANCE, Products, one_hot, tokens

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "gemm/linear_wide_fp8.cu"
TILES = [*tiles_of(SOURCE), *((tokens, 0) for (tokens,) in tiles_of(SOURCE, "STREAMED"))]


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def run(x, w, bias, tile, starts: tuple[int, ...] = (), seed: int = 0, kernel: Emulated | None = None) -> torch.Tensor:
    kernel = kernel or emulated(SOURCE, 90, NINE)
    (m, k), n = x[0].shape, w[0].shape[0]
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    given = (quantize_rows_fp8.in_lane_order(x[0]), x[1], *w, bias)
    return kernel.call("fp4_linear_wide_fp8", given, out, m, n, k, 0, *starts, *(0,) * (2 - len(starts)), 0, *tile, seed=seed,
                       scratch=kernel.scratch)  # fmt: skip


PRODUCTS = Products(run, weight, lambda w: e4m3_weight(*w[:2]))
error = PRODUCTS.error


def test_every_code_with_every_scale_is_that_of_the_transient_weight():
    """Each token picks one k, so that a column of the result is the E4M3 weight itself."""
    q = torch.arange(256, dtype=torch.uint8).repeat(127, 1)[:, torch.randperm(256)].contiguous()
    s = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(nvfp4.SCALE_DTYPE)
    for tile, first in (((256, 1), 0), ((256, 2), 256), ((128, 0), 200)):
        y = run(one_hot(tile[0], 512, first), (q, s, torch.tensor(WEIGHT_FACTOR)), None, tile)
        assert torch.equal(y.float(), e4m3_weight(q, s).float()[:, first : first + tile[0]].T), tile


@pytest.mark.parametrize("tile", TILES, ids=str)
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
            kernel.call("fp4_linear_wide_fp8", (None,) * 6, torch.empty(1), m, n, k, dtype, *starts, 0, *tile, scratch=kernel.scratch)


# --- the test of the test: one line is broken, and the emulator must say so ----------------------------------------
BROKEN = {
    "products are not waited for": ("      wgmma_wait<1>();\n", "", None),
    "activations are not waited for": ("            counter_wait(x_full + 8 * x.i, x.parity);\n", "", "before its asynchronous copy was waited for"),
    "activations are overwritten too early": ("          counter_wait(x_free + 8 * at.i, at.parity ^ 1);\n", "", "more arrivals|race"),
    "a half is not given back to the other block": (
        "if (frees) counter_arrive_at(last_half, lane);\n            frees",
        "if (frees && !lane) counter_arrive_at(last_half, lane);\n            frees",
        "deadlock",
    ),
    "weights are not waited for": ("      counter_wait(w_full + 8 * w.i, w.parity);\n", "", "before its asynchronous copy was waited for|nobody wrote"),
    "weights are given back before they are read": (
        "counter_init(w_free + 8 * i, kConsumers / 32)",
        "counter_init(w_free + 8 * i, 1)",
        "race|more|promise|deadlock",
    ),
    "a block leaves the cluster early": (
        "  __syncwarp();\n  cluster_barrier();  // nobody leaves",
        "  __syncwarp();  // nobody leaves",
        "deadlock|has ended|may still use",
    ),
    "another cluster's sums are not waited for": ("      while (!flag_get(flags + cluster * kBlocks + rank)) {}\n", "", None),
    "a flag is not set": ("if (threadIdx.x == 0) flag_set(", "if (threadIdx.x == 300) flag_set(", "deadlock"),
    "staging is not shared": (
        "    __syncwarp();\n#pragma unroll\n    for (int i = i0; i < (i0 + 8 < TO",
        "#pragma unroll\n    for (int i = i0; i < (i0 + 8 < TO",
        "race|nobody wrote",
    ),
    "scales of tokens are not waited for": ("      barrier(1, kConsumers);\n      out.store<0", "      out.store<0", "race|nobody wrote"),
    "columns past N are stored": ("if (m >= M || n >= N) continue;", "if (m >= M) continue;", "outside every allocation"),
    "tokens past M are stored": ("if (m >= M || n >= N) continue;", "if (n >= N) continue;", "outside every allocation"),
}


@pytest.mark.parametrize("case", emulator.one_of_each(BROKEN, 2))
def test_a_broken_kernel_is_caught(case, tmp_path):
    old, new, words = BROKEN[case]
    shutil.copytree(csrc_dir(), tmp_path / "csrc")
    source = tmp_path / "csrc" / SOURCE
    [place] = [p for p in (source, source.with_name("wide_fp8.cuh"), source.with_name("multiply_fp8.cuh")) if old in p.read_text()]
    assert place.read_text().count(old) == 1, "the line to break is gone"
    place.write_text(place.read_text().replace(old, new))
    source.write_text(re.sub(r"TILE\((192|256), \d\)|STREAMED\((192|256)\)", "", source.read_text()))  # fewer tiles compile faster
    kernel = Emulated(source, 90, (*NINE, *(emulator.QUICK if words else ())))
    x, w = tokens(70, 2816), weight(264 if "columns" in case else 250, 2816)
    if words is None:
        assert error(run(x, w, None, (128, 2), kernel=kernel), x, w) > 0.1
        return
    with pytest.raises(EmulatorError, match=words):
        run(x, w, None, (128, 1) if "tokens are" in case else (128, 2), kernel=kernel)
