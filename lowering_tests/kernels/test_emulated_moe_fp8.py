"""csrc/moe/grouped_wide_fp8.cu on a CPU (emulator.py): every tile against the same operands in float64, routing, and what a broken kernel is caught by."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels.moe import grouped_wide
from fp4_inductor.kernels.params import MoeParams
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops import quantize_rows_fp8
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR
from fp4_inductor.ops.dequantize_fp8 import reference as e4m3_weight
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, moe_fields, tiles_of
from lowering_tests.kernels.sparse24 import SEVERAL
from lowering_tests.kernels.test_emulated_moe import BF16, GPT_OSS, SILU, layer, routed, two_scales

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "moe/grouped_wide_fp8.cu"
TILES = {tile[0]: [*tile[3:], tile[0]] for tile in tiles_of(SOURCE)}  # the sizes of each
TOLERANCE = 4e-3  # of the same codes: rounding to bfloat16, between the products to one code or its neighbour
FP8_TWICE = 0.09  # of the layer: rounding to E4M3


def run(kernel: Emulated, x, ids, w, parts, act=SILU, expert_map=None, tile=64, seed=0, space=None) -> torch.Tensor:
    out = torch.full((x.shape[0], parts[3].shape[1]), float("nan"), dtype=x.dtype)
    return kernel.run(MoeParams, moe_fields(x, ids, w, parts, act, expert_map, tile), out, seed=seed, scratch=space)


def rounded(x: torch.Tensor) -> torch.Tensor:
    x8, scale = quantize_rows_fp8.reference(x)
    return x8.double() * scale.double()


def expected(x, ids, w, parts, act) -> torch.Tensor:
    """Of pairs that all have an expert: float64 sums of E4M3 operands."""
    up, down, (bias, down_bias) = parts[:3], parts[3:6], parts[6:]
    if contract.has_two_scales(up[2]):
        up = (*up[:2], contract.scale_of_rows(up[2], up[0].shape[1], act.interleaved))
    y = torch.zeros(x.shape[0], down[0].shape[1], dtype=torch.float64)
    for e in range(up[0].shape[0]):
        token, choice = torch.nonzero(ids == e, as_tuple=True)

        def product(rows, q, s, g, b, e=e):
            w = e4m3_weight(q[e], s[e]).double() * (g[e].double().reshape(-1, 1) / WEIGHT_FACTOR)
            return rows @ w.T + (0 if b is None else b[e].double())

        z = product(rounded(x[token]), *up, bias)
        h = rounded(act(z, down[0].shape[2] * 2).to(BF16))
        y.index_add_(0, token, product(h, *down, down_bias) * w[token, choice].double()[:, None])
    return y


def error(y, want) -> float:
    distance = ((y.double() - want).norm() / want.norm()).item()
    return distance if distance == distance else float("inf")


def check(x, ids, w, parts, act=SILU, tile=64, bound=TOLERANCE) -> torch.Tensor:
    y = run(emulated(SOURCE), x, ids, w, parts, act, tile=tile)
    assert error(y, expected(x, ids, w, parts, act)) <= bound, (x.shape, tile)
    assert error(y, contract.CONTRACT.reference(x.float(), ids, w, *parts, *act.arguments()).double()) <= FP8_TWICE
    return y


@pytest.mark.parametrize("tile", TILES)
def test_a_layer(tile):
    """An expert each of every size that the tile is compiled for, of one more, and of more than a tile; tails of outputs in either product."""
    counts = [*TILES[tile], TILES[tile][0] + 1, TILES[tile][-1] + 9]
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[torch.randperm(sum(counts))][:, None]
    check(torch.randn(sum(counts), 256).to(BF16), ids, torch.rand(ids.shape), layer(len(counts), 256, 192, width=136), tile=tile)
    check(torch.randn(5, 512).to(BF16), *routed(5, 2, 2), layer(2, 512, 320, width=264), tile=tile)


@pytest.mark.parametrize("tile", TILES)
def test_a_layer_of_gpt_oss(tile):
    """Biases, clamp, interleaved rows, K of no multiple of 256 in both products."""
    check(torch.randn(tile // 2 + 3, 320).to(BF16) * 3, *routed(tile // 2 + 3, 2, 3), layer(3, 320, 192, biased=True), GPT_OSS, tile=tile)


@pytest.mark.parametrize("tile", [64, 256])
def test_gate_and_up_with_a_global_scale_each(tile):
    """By another library of the same source: halves and interleaved rows; two equal scales are one, bit for bit."""
    several = emulated(SOURCE, 90, SEVERAL)
    for t, h, inner, biased, act in ((tile + 3, 256, 192, False, SILU), (9, 320, 192, True, GPT_OSS)):
        x, (ids, w), parts = torch.randn(t, h).to(BF16), routed(t, 2, 3), layer(3, h, inner, biased=biased)
        apart = two_scales(parts)
        assert error(run(several, x, ids, w, apart, act, tile=tile), expected(x, ids, w, apart, act)) <= TOLERANCE
        equal = (*parts[:2], parts[2][:, None].repeat(1, 2), *parts[3:])
        assert torch.equal(run(several, x, ids, w, equal, act, tile=tile), run(emulated(SOURCE), x, ids, w, parts, act, tile=tile))


@pytest.mark.parametrize("act", [Activation("silu", 1.702, 0.5), Activation("swiglu_oai", 1.702), Activation("silu", interleaved=True)], ids=str)
def test_other_activations(act):
    for h in (256, 192):
        check(torch.randn(6, h).to(BF16), *routed(6, 2, 4), layer(4, h, 128, biased=True), act)


@pytest.mark.parametrize("h", [64, 192, 256, 1280, 8192, 16448])
def test_tokens_are_rounded_as_the_contract_does(h):
    """By one to eight warps a row; rows of zeros, and of numbers near both ends of float32."""
    x = torch.randn(9, h).to(BF16)
    x[1], x[2], x[3] = 0, x[2] * 1e30, x[3] * 1e-36
    y = run(emulated(SOURCE), x, *routed(9, 1, 2), parts := layer(2, h, 64), Activation("silu", limit=1e30))
    assert not y[1].any() and torch.isfinite(y[[0, 1, *range(3, 9)]]).all()
    check(x[4:], *routed(5, 1, 2), parts)


def test_ids_that_are_no_expert_and_maps():
    parts = layer(5, 64, 64)
    x, w, ids = torch.randn(40, 64).to(BF16), torch.rand(40, 3), torch.randint(-2, 8, (40, 3))
    w[(ids < 0) | (ids > 4)] = float("nan")
    for table in (None, torch.tensor([4, -1, 0, 7, 2, 1]), torch.tensor([3], dtype=torch.int32)):
        local = contract.local_ids(ids, table, 5)
        given = torch.where(local < 0, w, 0.5).to(BF16)
        y = run(emulated(SOURCE), x, ids, given, parts, expert_map=table, tile=96)
        assert error(y, contract.CONTRACT.reference(x.float(), ids, given, *parts, *SILU.arguments(), False, table).double()) <= FP8_TWICE
    none = run(emulated(SOURCE), x, torch.full_like(ids, -1), w, parts)
    assert none.shape == x.shape and not none.any()


def test_the_bits_do_not_depend_on_the_tile_nor_on_the_order_of_threads_nor_tokens_on_each_other():
    parts, x, (ids, w) = layer(3, 256, 320), torch.randn(140, 256).to(BF16), routed(140, 2, 3)
    y = run(emulated(SOURCE), x, ids, w, parts)
    assert torch.equal(run(emulated(SOURCE), x, ids, w, parts, seed=7), y)
    for tile in TILES:
        assert torch.equal(run(emulated(SOURCE), x, ids, w, parts, tile=tile), y)
    x[3, 5] = float("nan")
    z = run(emulated(SOURCE), x, ids, w, parts, Activation("silu", limit=1e30))
    keep = [i for i in range(140) if i != 3]
    assert torch.equal(z[keep], y[keep])
    assert z[3].isnan().all()


def test_arguments_that_no_kernel_takes():
    parts, x, (ids, w) = layer(2, 64, 64), torch.randn(3, 64).to(BF16), routed(3, 2, 2)
    for changed in (dict(tile=24), dict(space=1024), dict(x=torch.randn(3, 96).to(BF16))):
        with pytest.raises(EmulatorError, match="status"):
            run(emulated(SOURCE), **{**dict(x=x, ids=ids, w=w, parts=parts), **changed})


def test_the_tile_follows_pairs_an_expert():
    assert {grouped_wide.tile_fp8(pairs, 1).tokens for pairs in range(1, 2000)} == set(TILES)


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
TOO_EARLY = "before its asynchronous copy was waited for|nobody wrote"
CAUGHT = [
    ("SKIP_WEIGHTS_WAIT", TOO_EARLY),
    ("SKIP_TOKENS_WAIT", TOO_EARLY),
    ("ARRIVE_BEFORE_COPIES", "before its asynchronous copy was waited for"),
    ("ONE_WARP_KEEPS_TOKENS", "deadlock"),
    ("STAGING_OVERWRITTEN", "race"),
    ("STORE_ROWS_PAST_PAIRS", "outside every allocation|race"),
    ("READ_SCALES_PAST_END", "outside every allocation"),
    ("BLOCK_ENDS_EARLY", "ended|left|cluster"),
    ("UPS_ARE_GATES", None),
    ("ROUND_ROWS_IN_ORDER", None),
    ("MAXIMUM_OF_A_WARP", None),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    tile = 192 if "STAGING" in fault else 64
    parts, x, kernel = layer(3, 1344, 320, width=264), torch.randn(140, 1344).to(BF16), emulated(SOURCE)
    x[:, :64] *= 8
    given = x, torch.arange(280).view(140, 2) // 94 // (tile // 100 + 1), torch.rand(140, 2), parts
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, *given, tile=tile), expected(*given, SILU)), 0.02)
