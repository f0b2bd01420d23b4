"""csrc/moe/grouped_wide.cu on a CPU (emulator.py): every tile of both products against float64, every kind of routing, and the emulator's own checks."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels.moe import grouped_wide
from fp4_inductor.kernels.moe.grouped_wide import Tile
from fp4_inductor.kernels.params import MoeParams
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, moe_fields
from lowering_tests.kernels.sparse24 import SEVERAL

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "moe/grouped_wide.cu"
TILES = emulator.grouped_tiles()
EIGHT = Tile(8)
SILU, GPT_OSS = Activation(), Activation("swiglu_oai", 1.702, 7.0, True)
BF16 = torch.bfloat16


def experts(e, n, k):
    """Bytes are drawn directly: every code, scales from 2**-2 to 2**1."""
    q = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)
    return q, torch.randint(0x28, 0x40, (e, n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE), (torch.rand(e) + 0.5) / k**0.5 / 8


def layer(e=4, h=256, inner=256, biased=False, width=None):
    width = width or h
    biases = (torch.randn(e, 2 * inner).to(BF16), torch.randn(e, width).to(BF16)) if biased else (None, None)
    return (*experts(e, 2 * inner, h), *experts(e, width, inner), *biases)


def two_scales(parts):
    """Gate and up of every expert under a global scale each, a decade apart."""
    return (*parts[:2], parts[2][:, None] * torch.tensor([0.4, 4.0]), *parts[3:])


def run(kernel: Emulated, x, ids, w, parts, act=SILU, expert_map=None, tile=EIGHT, seed=0, space=None) -> torch.Tensor:
    out = torch.full((x.shape[0], parts[3].shape[1]), float("nan"), dtype=x.dtype)
    return kernel.run(MoeParams, moe_fields(x, ids, w, parts, act, expert_map, tile), out, seed=seed, scratch=space)


def error(y, x, ids, w, parts, act=SILU, expert_map=None) -> float:
    r = contract.CONTRACT.reference(x.float(), ids, w, *parts, *act.arguments(), False, expert_map).double()
    distance = ((y.double() - r).norm() / r.norm()).item()
    return distance if distance == distance else float("inf")


def routed(t, k, e):
    w, ids = torch.rand(t, max(k, e)).topk(k)
    return ids % e, w


def awkward(t, k, ids_dtype):
    """``(ids, weights, map)`` for five experts: ids that are none, weights of every dtype, maps; what counts for nothing has NaN for a weight."""
    w, ids = torch.rand(t, k), torch.randint(-2, 8, (t, k)).to(ids_dtype)
    for dtype in (BF16, torch.float16, torch.float32):
        yield ids, w.to(dtype), None
    w[ids < 0] = float("nan")
    for table in (torch.tensor([4, -1, 0, 7, 2, 1]), torch.tensor([3], dtype=torch.int32)):
        yield ids, torch.where(contract.local_ids(ids, table, 5) < 0, w, 0.5), table


def check(x, ids, w, parts, act=SILU, expert_map=None, tile=EIGHT) -> None:
    y = run(emulated(SOURCE), x, ids, w, parts, act, expert_map, tile)
    assert error(y, x, ids, w, parts, act, expert_map) <= 4e-3, (x.shape, tile)


@pytest.mark.parametrize("tile", TILES)
def test_a_layer(tile):
    """Whole and part tiles, several of one expert and none; tails of outputs in either product; K of a multiple of 256 and, in the second, of 64."""
    for t, e, h, inner, width in ((tile.tokens + 3, 3, 256, 256, 256), (5, 2, 256, 320, 136)):
        check(torch.randn(t, h).to(BF16), *routed(t, 2, e), layer(e, h, inner, width=width), tile=tile)


@pytest.mark.parametrize("tile", TILES)
def test_a_layer_of_gpt_oss(tile):
    """Biases, clamp, interleaved rows, K of no multiple of 256 in both products."""
    t = tile.tokens // 2 + 3
    check(torch.randn(t, 320).to(BF16) * 3, *routed(t, 2, 3), layer(3, 320, 192, biased=True), GPT_OSS, tile=tile)


@pytest.mark.parametrize("tile", [Tile(8), Tile(8, True), Tile(32)])
def test_gate_and_up_with_a_global_scale_each(tile):
    """By another library of the same source: each form of the first product, halves and interleaved rows; two equal scales are one, bit for bit."""
    several = emulated(SOURCE, 90, SEVERAL)
    for t, h, inner, biased, act in ((tile.tokens + 3, 256, 256, False, SILU), (5, 320, 192, True, GPT_OSS)):
        x, (ids, w), parts = torch.randn(t, h).to(BF16), routed(t, 2, 3), layer(3, h, inner, biased=biased)
        apart = two_scales(parts)
        assert error(run(several, x, ids, w, apart, act, tile=tile), x, ids, w, apart, act) <= 4e-3
        equal = (*parts[:2], parts[2][:, None].repeat(1, 2), *parts[3:])
        assert torch.equal(run(several, x, ids, w, equal, act, tile=tile), run(emulated(SOURCE), x, ids, w, parts, act, tile=tile))


@pytest.mark.parametrize("act", [Activation("silu", 1.702, 0.5), Activation("swiglu_oai", 1.702), Activation("silu", interleaved=True)], ids=str)
def test_other_activations(act):
    for h in (256, 192):
        check(torch.randn(6, h).to(BF16), *routed(6, 2, 4), layer(4, h, 128, biased=True), act)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_are_no_expert_and_maps(ids_dtype):
    parts, x = layer(5, 64, 64), torch.randn(40, 64).to(BF16)
    for ids, w, table in awkward(40, 3, ids_dtype):
        check(x, ids, w, parts, expert_map=table, tile=Tile(16) if table is None else Tile(8))
    none = run(emulated(SOURCE), x, torch.full_like(ids, -1), w, parts)
    assert none.shape == x.shape and not none.any()


def test_many_experts_one_expert_and_skew():
    for e, t, k in ((200, 9, 4), (1, 20, 2), (1024, 3, 2)):
        check(torch.randn(t, 64).to(BF16), torch.randint(0, e, (t, k)), torch.rand(t, k), layer(e, 64, 64))
    ids = torch.randint(-1, 40, (400, 3))  # more pairs than one block routes
    check(torch.randn(400, 64).to(BF16), ids, torch.rand(400, 3).where(ids >= 0, float("nan")), layer(40, 64, 64), tile=Tile(32, True))
    check(torch.randn(5, 64).to(BF16), torch.randint(0, 40, (5, 19)), torch.rand(5, 19), layer(40, 64, 64))  # more choices than a thread adds at a time
    ids = torch.zeros(600, 2, dtype=torch.int32)  # more pairs than the routing block has threads, nearly all of one expert
    ids[::50, 1] = torch.arange(12) % 7
    check(torch.randn(600, 64).to(BF16), ids, torch.rand(600, 2), layer(7, 64, 64), tile=Tile(128))


def test_the_bits_do_not_depend_on_the_order_of_threads_nor_tokens_on_each_other():
    parts, x, (ids, w) = layer(3, 256, 320), torch.randn(24, 256).to(BF16), routed(24, 2, 3)
    y = run(emulated(SOURCE), x, ids, w, parts)
    for tile in (Tile(8), Tile(8, True)):
        assert torch.equal(run(emulated(SOURCE), x, ids, w, parts, tile=tile, seed=7), y)
    x[3, 5] = float("nan")
    z = run(emulated(SOURCE), x, ids, w, parts, Activation("silu", limit=1e30))
    keep = [i for i in range(24) if i != 3]
    assert torch.equal(z[keep], y[keep])
    assert not torch.isfinite(z[3]).any()


def test_arguments_that_no_kernel_takes():
    test_a_broken_kernel_is_caught("TEAMS_SHARE_RINGS", "race", Tile(8))  # what it says must not be said of the next call
    parts, x, (ids, w) = layer(2, 64, 64), torch.randn(3, 64).to(BF16), routed(3, 2, 2)
    for changed in (dict(tile=Tile(24)), dict(space=4096), dict(x=torch.randn(3, 96).to(BF16))):
        with pytest.raises(EmulatorError, match="status"):
            run(emulated(SOURCE), **{**dict(x=x, ids=ids, w=w, parts=parts), **changed})


def test_the_tile_follows_pairs_an_expert():
    few, many = ([grouped_wide.tile(pairs, 128, 2048, inner) for pairs in (1, 768, 769, 1024, 3072, 4096, 8192, 16384, 10**6)] for inner in (768, 2880))
    assert few == [Tile(tokens, True) for tokens in (8, 8, 16, 16, 32, 48, 80, 128, 128)]
    assert many == [Tile(tokens) for tokens in (8, 8, 16, 16, 32, 48, 96, 128, 128)]
    assert {grouped_wide.tile(pairs, 1, k, 768) for k in (2048, 2880) for pairs in range(1, 200)} == set(TILES)


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
TOO_EARLY = "before its asynchronous copy was waited for|nobody wrote"
CAUGHT = [  # a fault, what the emulator says, and the tile
    ("SKIP_WEIGHTS_WAIT", TOO_EARLY, Tile(8)),
    ("SKIP_WGMMA_WAIT", "race|before its asynchronous copy was waited for", Tile(32)),
    ("SCALES_OF_ANOTHER_ROW", None, Tile(8)),
    ("SKIP_SCALES_SWIZZLE", None, Tile(8)),
    ("SCALES_BEGIN_ALIGNED", None, Tile(8)),
    ("ONE_WARP_KEEPS_TOKENS", "deadlock", Tile(32)),
    ("ONE_WARP_KEEPS_TOKENS", "deadlock", Tile(8)),
    ("STAGING_OVERWRITTEN", "race", Tile(32)),
    ("TEAMS_SHARE_RINGS", "race", Tile(8)),
    ("LEAVE_OUT_ITEMS", None, Tile(8)),
    ("ONE_TILE_AN_EXPERT", None, Tile(8)),
    ("ONE_TEAM_FILLS_TABLE", "race|nobody wrote", Tile(8)),
    ("X_IN_DECODE_ORDER", None, Tile(8)),
    ("X_IN_DECODE_ORDER", None, Tile(8, True)),
    ("H_IN_DECODE_ORDER", None, Tile(8)),
    ("STORE_ROWS_PAST_PAIRS", "outside every allocation", Tile(8)),
    ("SKIP_PUBLISHING_ROWS", "was not published", Tile(32, True)),
    ("PUBLISH_ROWS_EARLY", "was not published", Tile(32, True)),
    ("ARRIVE_BEFORE_COPIES", "before its asynchronous copy was waited for", Tile(8, True)),
    ("SKIP_TOKENS_FREE_WAIT", "race|more arrivals", Tile(8, True)),
    ("SKIP_SWIZZLE", None, Tile(8, True)),
    ("GATHER_PAIRS", None, Tile(8, True)),
    ("UPS_ARE_GATES", None, Tile(8)),
    ("SKIP_BARRIER_BEFORE_SORTED", "race|nobody wrote", Tile(8)),
    ("AN_EXPERT_OF_ONE", None, Tile(8)),
    ("LEAVE_OUT_A_CHOICE", None, Tile(8, True)),
]
# The same with more pairs than one block routes.
CAUGHT_ROUTING = [
    ("PAIRS_BEGIN_ELSEWHERE", None),
    ("WARPS_BEGIN_ALIKE", None),
    ("BLOCKS_BEGIN_ALIKE", None),
    ("SKIP_CLUSTER_BARRIER_BEFORE_SUMS", "race|nobody wrote|had not begun"),
]


def check_caught(fault, words, x, ids, w, parts, tile) -> None:
    kernel = emulated(SOURCE)
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, x, ids, w, parts, tile=tile), x, ids, w, parts), 0.01)


@pytest.mark.parametrize(("fault", "words", "tile"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words, tile):
    x, ids = torch.randn(20, 320).to(BF16), torch.arange(40).view(20, 2) // 14  # more than a tile of 8 of each expert
    check_caught(fault, words, x, ids, torch.rand(20, 2), layer(3, 320, 320, width=264), tile)


@pytest.mark.parametrize(("fault", "words"), CAUGHT_ROUTING)
def test_broken_routing_is_caught(fault, words):
    x, ids, w = torch.randn(400, 64).to(BF16), torch.randint(0, 7, (400, 3)), torch.rand(400, 3)
    check_caught(fault, words, x, ids, w, layer(7, 64, 64), Tile(128, True))
