"""csrc/moe/grouped_wide.cu on a CPU (emulator.py): every tile of both products against float64, every kind of routing, and the emulator's own checks."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels.moe import grouped_wide
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, tiles_of
from lowering_tests.kernels.sparse24 import SEVERAL

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "moe/grouped_wide.cu"
TILES = [tile[0] for tile in tiles_of(SOURCE)]
SILU, GPT_OSS = Activation(), Activation("swiglu_oai", 1.702, 7.0, True)
BF16 = torch.bfloat16
CODE = {torch.int32: 0, torch.int64: 1, BF16: 0, torch.float16: 1, torch.float32: 2}


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


def run(kernel: Emulated, x, ids, w, parts, act=SILU, expert_map=None, tile=8, seed=0, space=None) -> torch.Tensor:
    (t, h), (e, width), inner = x.shape, parts[3].shape[:2], parts[3].shape[2] * 2
    space = grouped_wide.workspace_bytes(t, ids.numel(), e, h, inner, width, tile) if space is None else space
    types = CODE[ids.dtype], CODE[w.dtype], *((0, 0) if expert_map is None else (CODE[expert_map.dtype], expert_map.numel()))
    form = ctypes.c_float(act.alpha), ctypes.c_float(act.limit or 0.0), int(act.name == "swiglu_oai"), int(act.interleaved)
    out = torch.full((t, width), float("nan"), dtype=x.dtype)
    sizes = t, ids.shape[1], e, h, inner, width
    rest = *sizes, *types, *form, tile, ctypes.c_int64(space)
    return kernel.call("fp4_grouped_wide", (x, ids, w, *parts, expert_map), out, *rest, seed=seed, scratch=space)


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


def check(x, ids, w, parts, act=SILU, expert_map=None, tile=8) -> None:
    y = run(emulated(SOURCE), x, ids, w, parts, act, expert_map, tile)
    assert error(y, x, ids, w, parts, act, expert_map) <= 4e-3, (x.shape, tile)


@pytest.mark.parametrize("tile", TILES)
def test_a_layer(tile):
    """Whole and part tiles, several of one expert and none; tails of outputs in either product; K of a multiple of 256 and, in the second, of 64."""
    for t, e, h, inner, width in ((tile + 3, 3, 256, 256, 256), (5, 2, 256, 320, 136)):
        check(torch.randn(t, h).to(BF16), *routed(t, 2, e), layer(e, h, inner, width=width), tile=tile)


@pytest.mark.parametrize("tile", TILES)
def test_a_layer_of_gpt_oss(tile):
    """Biases, clamp, interleaved rows, K of no multiple of 256 in both products."""
    t = tile // 2 + 3
    check(torch.randn(t, 320).to(BF16) * 3, *routed(t, 2, 3), layer(3, 320, 192, biased=True), GPT_OSS, tile=tile)


@pytest.mark.parametrize("tile", [8, 9, 32])
def test_gate_and_up_with_a_global_scale_each(tile):
    """By another library of the same source: each form of the first product, halves and interleaved rows; two equal scales are one, bit for bit."""
    several = emulated(SOURCE, 90, SEVERAL)
    for t, h, inner, biased, act in ((tile + 3, 256, 256, False, SILU), (5, 320, 192, True, GPT_OSS)):
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
        check(x, ids, w, parts, expert_map=table, tile=16 if table is None else 8)
    none = run(emulated(SOURCE), x, torch.full_like(ids, -1), w, parts)
    assert none.shape == x.shape and not none.any()


def test_many_experts_one_expert_and_skew():
    for e, t, k in ((200, 9, 4), (1, 20, 2), (1024, 3, 2)):
        check(torch.randn(t, 64).to(BF16), torch.randint(0, e, (t, k)), torch.rand(t, k), layer(e, 64, 64))
    ids = torch.randint(-1, 40, (400, 3))  # more pairs than one block routes
    check(torch.randn(400, 64).to(BF16), ids, torch.rand(400, 3).where(ids >= 0, float("nan")), layer(40, 64, 64), tile=33)
    check(torch.randn(5, 64).to(BF16), torch.randint(0, 40, (5, 19)), torch.rand(5, 19), layer(40, 64, 64))  # more choices than a thread adds at a time
    ids = torch.zeros(600, 2, dtype=torch.int32)  # more pairs than the routing block has threads, nearly all of one expert
    ids[::50, 1] = torch.arange(12) % 7
    check(torch.randn(600, 64).to(BF16), ids, torch.rand(600, 2), layer(7, 64, 64), tile=128)


def test_the_bits_do_not_depend_on_the_order_of_threads_nor_tokens_on_each_other():
    parts, x, (ids, w) = layer(3, 256, 320), torch.randn(24, 256).to(BF16), routed(24, 2, 3)
    y = run(emulated(SOURCE), x, ids, w, parts)
    for tile in (8, 9):
        assert torch.equal(run(emulated(SOURCE), x, ids, w, parts, tile=tile, seed=7), y)
    x[3, 5] = float("nan")
    z = run(emulated(SOURCE), x, ids, w, parts, Activation("silu", limit=1e30))
    keep = [i for i in range(24) if i != 3]
    assert torch.equal(z[keep], y[keep])
    assert not torch.isfinite(z[3]).any()


def test_arguments_that_no_kernel_takes():
    parts, x, (ids, w) = layer(2, 64, 64), torch.randn(3, 64).to(BF16), routed(3, 2, 2)
    for changed in (dict(tile=24), dict(space=4096), dict(x=torch.randn(3, 96).to(BF16))):
        with pytest.raises(EmulatorError, match="status"):
            run(emulated(SOURCE), **{**dict(x=x, ids=ids, w=w, parts=parts), **changed})


def test_the_tile_follows_pairs_an_expert():
    few, many = ([grouped_wide.tile(pairs, 128, 2048, inner) for pairs in (1, 768, 769, 1024, 3072, 4096, 8192, 16384, 10**6)] for inner in (768, 2880))
    assert few == [9, 9, 17, 17, 33, 49, 81, 129, 129] and many == [8, 8, 16, 16, 32, 48, 96, 128, 128]
    assert {grouped_wide.tile(pairs, 1, k, 768) for k in (2048, 2880) for pairs in range(1, 200)} == set(TILES)


# One line of the kernels is broken; the emulator must say so, each in its own words, or the numbers must be wrong.
BROKEN = {
    "weights are not waited for": ("      counter_wait(w_full + 8 * w.i, w.parity);\n", "", "before its asynchronous copy was waited for|nobody wrote"),
    "the tile is given back before its products are done": ("        wgmma_wait<1>();\n", "", "race|before its asynchronous copy was waited for", 32),
    "scales are those of another of four rows": ("row % 4 * S::kScalesPlace", "(row + 1) % 4 * S::kScalesPlace", None),
    "scales lie as they come": (" ^ row / 16 % 2 * 16);", ");", None),
    "scales begin at a multiple of 16 bytes": ("scales_at(row % 4, half) % 16 + 4 * t", "4 * t", None),
    "one warp does not give tiles back": (
        "if (frees) counter_arrive(last_half);\n            frees",
        "if (frees && warp) counter_arrive(last_half);\n            frees",
        "deadlock",
        32,
    ),
    "one warp of those that multiply for themselves does not": ("if (kByWarp<TOKENS> && lane == 0)", "if (kByWarp<TOKENS> && lane == 0 && warp)", "deadlock"),
    "the staging is overwritten": ("      if constexpr (!kByWarp<TOKENS>) barrier(1 + rows, 128);  // nobody reads what was staged before\n", "", "race", 32),
    "teams have the same rings": (" + team * S::kTeamBytes;", ";", "race"),
    "a team's items are left out": ("item += TEAMS * gridDim.x;", "item += 2 * TEAMS * gridDim.x;", None),
    "tiles of an expert are one": ("if (TEAMS == 1 || n > 1)", "if (TEAMS == 1)", None),
    "one team fills the table": ("threadIdx.x, S::kTeams * S::kThreads);", "threadIdx.x % S::kThreads, S::kTeams * S::kThreads);", "race|nobody wrote"),
    "words of x are in the pairs of decode()": ("gather<T, TOKENS, kByWarp<TOKENS>>", "gather<T, TOKENS, false>", None),
    "tokens are": ("route<T, kByWarp<TOKENS>>", "route<T>", None, 9),
    "words of h are": ("kByWarp<TOKENS> ? 4 : 16", "16", None),
    "rows past the pairs are stored": ("if (m < count && n < N)", "if (n < N)", "outside every allocation"),
    "gathered rows are not published": ("            if (GATHERED && !kByWarp<TOKENS>) let_wgmma_see();\n", "", "was not published", 33),
    "they are published too early": (
        "            counter_wait(x_full + 16 * at.i + 8 * j, at.parity);\n            if (GATHERED && !kByWarp<TOKENS>) let_wgmma_see();\n",
        "            if (GATHERED && !kByWarp<TOKENS>) let_wgmma_see();\n            counter_wait(x_full + 16 * at.i + 8 * j, at.parity);\n",
        "was not published",
        33,
    ),
    "they arrive before they are there": ("counter_arrive_behind_copies(x_full", "counter_arrive(x_full", "before its asynchronous copy was waited for", 9),
    "they are not waited for": ("counter_wait(x_free + 16 * at.i + 8 * j, at.parity ^ 1);\n            gather", "gather", "race|more arrivals", 9),
    "they lie as they come": ("(chunk ^ row) * 16", "chunk * 16", None, 9),
    "they are pairs, not tokens": ("rows[i] / top_k * steps", "rows[i] % 40 * steps", None, 9),
    "ups are gates": ("copy_planes(to + S::kHigh, codes_up", "copy_planes(to + S::kHigh, codes", None),
    "an expert's pairs begin elsewhere": ("starts[e] = all_pairs + before[h],", "starts[e] = all_pairs + (e > 1),", "outside every allocation"),
    "pairs of all warps begin at the same place": ("starts[e] + mine[e] + (v[j]", "starts[e] + (v[j]", None),
    "choices are left out": ("min(kAhead, top_k - first)", "min(kAhead, top_k - 1 - first)", None, 9),
}


# The same with more pairs than one block routes.
BROKEN_ROUTING = {
    "pairs of all blocks begin at the same place": ("starts[e] = all_pairs + before[h],", "starts[e] = all_pairs,", None),
    "sums of a block are read before they are there": ("  cluster_barrier();\n  // A thread has", "  // A thread has", "race|nobody wrote|had not begun"),
}


def broken(case, tile, folder):
    """The library with one line replaced, of one tile: that compiles faster."""
    old, new = case[:2]
    shutil.copytree(csrc_dir(), folder / "csrc")
    places = [p for p in (folder / "csrc" / "moe").iterdir() if "fp8" not in p.name and old in p.read_text()]
    assert len(places) == 1 and places[0].read_text().count(old) == 1, "the line to break is gone"
    places[0].write_text(places[0].read_text().replace(old, new))
    source = folder / "csrc" / SOURCE
    source.write_text(re.sub(rf"\n  TILE\((?!{tile},)[\d, ]+\)", "", source.read_text()))
    return Emulated(source, defines=emulator.QUICK if case[2] else ())


def check_broken(kernel, words, x, ids, w, parts, tile):
    if words is None:
        assert error(run(kernel, x, ids, w, parts, tile=tile), x, ids, w, parts) > 0.01
    else:
        with pytest.raises(EmulatorError, match=words):
            run(kernel, x, ids, w, parts, tile=tile)


@pytest.mark.parametrize("case", emulator.one_of_each(BROKEN, 2))
def test_a_broken_kernel_is_caught(case, tmp_path):
    _, _, words, *tile = BROKEN[case]
    tile = tile[0] if tile else 8
    parts, x = layer(3, 320, 320, width=264), torch.randn(40, 320).to(BF16)
    check_broken(broken(BROKEN[case], tile, tmp_path), words, x, torch.arange(80).view(40, 2) // 27, torch.rand(40, 2), parts, tile)


@pytest.mark.parametrize("case", emulator.one_of_each(BROKEN_ROUTING, 2))
def test_broken_routing_is_caught(case, tmp_path):
    x, ids, w = torch.randn(400, 64).to(BF16), torch.randint(0, 7, (400, 3)), torch.rand(400, 3)
    check_broken(broken(BROKEN_ROUTING[case], 129, tmp_path), BROKEN_ROUTING[case][2], x, ids, w, layer(7, 64, 64), 129)
