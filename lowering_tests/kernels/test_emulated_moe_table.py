"""csrc/moe/decode_table.cu on a CPU (emulator.py): both products, dense and 2:4-sparse, against float64, routing, and what a broken kernel is caught by."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels.params import MoeParams
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, moe_fields
from lowering_tests.kernels.sparse24 import LEGAL, SEVERAL
from lowering_tests.kernels.test_emulated_moe import GPT_OSS, SILU, awkward, experts, routed, two_scales

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCE = "moe/decode_table.cu"
BF16 = torch.bfloat16
# (sets, sets_a_warp, k_groups) of gate_up and of down, and the blocks that share K of down; all 0: the kernel's own choice
OWN = (0,) * 7
TILES = [(1, 1, 1, 1, 1, 2, 1), (2, 2, 16, 2, 2, 3, 2), (4, 2, 3, 1, 1, 16, 1), (2, 1, 5, 6, 2, 4, 4), (8, 2, 2, 4, 1, 2, 2), (4, 2, 8, 2, 2, 8, 1)]


def sparse(e, n, k):
    """As ``experts``: kept codes, every pattern, scales, global scales."""
    _, scale, g = experts(e, n, k)
    nibbles = LEGAL[torch.randint(0, 6, (e, n, k // 4))]
    return torch.randint(0, 256, (e, n, k // 4), dtype=torch.uint8), scale, g, nibbles[..., ::2] | nibbles[..., 1::2] << 4


def layer(e=4, h=256, inner=256, width=None, biased=False, kinds=(experts, experts)):
    """Both weights, biases, and metadata of both."""
    width = width or h
    (*up, up_meta), (*down, down_meta) = (
        (*kind(e, n, k), *(() if kind is sparse else (None,))) for kind, n, k in zip(kinds, (2 * inner, width), (h, inner), strict=True)
    )
    biases = (torch.randn(e, 2 * inner).to(BF16), torch.randn(e, width).to(BF16)) if biased else (None, None)
    return *up, *down, *biases, up_meta, down_meta


def run(kernel: Emulated, x, ids, w, parts, act=SILU, expert_map=None, tile=OWN, seed=0, space=None) -> torch.Tensor:
    out = torch.full((x.shape[0], parts[3].shape[1]), float("nan"), dtype=x.dtype)
    return kernel.run(MoeParams, moe_fields(x, ids, w, parts, act, expert_map, tile), out, seed=seed, scratch=space)


def error(y, x, ids, w, parts, act=SILU, expert_map=None) -> float:
    metas = dict(gate_up_meta=parts[8], down_meta=parts[9])
    r = contract.CONTRACT.reference(x.float(), ids, w, *parts[:8], *act.arguments(), False, expert_map, **metas).double()
    distance = ((y.double() - r).norm() / r.norm()).item()
    return distance if distance == distance else float("inf")


def check(x, ids, w, parts, act=SILU, expert_map=None, tile=OWN) -> None:
    y = run(emulated(SOURCE), x, ids, w, parts, act, expert_map, tile)
    assert error(y, x, ids, w, parts, act, expert_map) <= 4e-3, (x.shape, tile)


@pytest.mark.parametrize("kind", [experts, sparse])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, kind):
    """One token and eight; K of one step and of several, fewer and more than warps share it; outputs that are no multiple of a block's."""
    for t, e, h, inner, width in ((1, 3, 256, 256, 104), (8, 2, 768, 512, 264)):
        check(torch.randn(t, h).to(BF16), *routed(t, 2, e), layer(e, h, inner, width, kinds=(kind, kind)), tile=tile)


@pytest.mark.parametrize("kinds", [(experts, sparse), (sparse, experts)], ids=["down", "up"])
def test_one_product_is_sparse(kinds):
    check(torch.randn(5, 512).to(BF16), *routed(5, 2, 3), layer(3, 512, 256, 72, kinds=kinds))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 17])
def test_tokens(tokens):
    parts = layer(5, 256, 256, 72, kinds=(experts, sparse))
    check(torch.randn(tokens, 256).to(BF16), *routed(tokens, 3, 5), parts)


@pytest.mark.parametrize("tile", [OWN, (2, 1, 5, 6, 2, 4, 4), (4, 2, 3, 2, 2, 5, 1)], ids=str)
def test_a_layer_of_gpt_oss(tile):
    """Biases, clamp, interleaved rows, K of no multiple of 256 in both products."""
    for t, h, inner in ((1, 320, 192), (5, 192, 320), (8, 576, 64)):
        check(torch.randn(t, h).to(BF16) * 3, *routed(t, 2, 3), layer(3, h, inner, biased=True), GPT_OSS, tile=tile)


@pytest.mark.parametrize("kinds", [(experts, experts), (sparse, sparse)], ids=["dense", "sparse"])
def test_gate_and_up_with_a_global_scale_each(kinds):
    """By another library of the same source: halves and interleaved rows; two equal scales are one, bit for bit."""
    several = emulated(SOURCE, 90, SEVERAL)
    for t, h, inner, biased, act, tile in ((1, 256, 256, False, SILU, OWN), (8, 512, 256, True, GPT_OSS, OWN), (5, 256, 512, False, SILU, TILES[3])):
        x, (ids, w), parts = torch.randn(t, h).to(BF16), routed(t, 3, 5), layer(5, h, inner, biased=biased, kinds=kinds)
        apart = two_scales(parts)
        assert error(run(several, x, ids, w, apart, act, tile=tile), x, ids, w, apart, act) <= 4e-3
        equal = (*parts[:2], parts[2][:, None].repeat(1, 2), *parts[3:])
        assert torch.equal(run(several, x, ids, w, equal, act, tile=tile), run(emulated(SOURCE), x, ids, w, parts, act, tile=tile))


@pytest.mark.parametrize("act", [Activation("silu", 1.702, 0.5), Activation("swiglu_oai", 1.702), Activation("silu", interleaved=True)], ids=str)
def test_other_activations(act):
    for h, kinds in ((192, (experts, experts)), (256, (experts, experts)), (256, (sparse, experts))):
        check(torch.randn(6, h).to(BF16), *routed(6, 2, 4), layer(4, h, 128, biased=True, kinds=kinds), act)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_are_no_expert_and_maps(ids_dtype):
    """More pairs than a warp takes at a time, the same expert twice in a token, none at all."""
    parts, x = layer(5, 64, 64, biased=True), torch.randn(8, 64).to(BF16)
    for ids, w, table in awkward(8, 9, ids_dtype):
        check(x, ids, w, parts, expert_map=table)
    none = run(emulated(SOURCE), x, torch.full_like(ids, -1), w, parts)
    assert none.shape == x.shape and not none.any()


def test_many_experts_and_more_choices_than_experts():
    for e, t, k in ((200, 8, 4), (1, 7, 3), (1024, 3, 2), (40, 8, 19)):
        check(torch.randn(t, 64).to(BF16), torch.randint(0, e, (t, k)), torch.rand(t, k), layer(e, 64, 64))


@pytest.mark.parametrize("kinds", [(experts, experts), (sparse, sparse)], ids=["dense", "sparse"])
def test_the_bits_do_not_depend_on_the_order_of_threads_nor_tokens_on_each_other(kinds):
    parts, x, (ids, w) = layer(3, 512, 256, kinds=kinds), torch.randn(11, 512).to(BF16), routed(11, 2, 3)
    y = run(emulated(SOURCE), x, ids, w, parts)
    assert torch.equal(run(emulated(SOURCE), x, ids, w, parts, seed=7), y)
    x[3, 5] = float("nan")
    z = run(emulated(SOURCE), x, ids, w, parts, Activation("silu", limit=1e30))
    keep = [i for i in range(11) if i != 3]
    assert torch.equal(z[keep], y[keep])
    assert not torch.isfinite(z[3]).any()


def test_x_of_fewer_tokens_at_a_time_where_eight_do_not_fit():
    for h in (8192, 16384):
        check(torch.randn(9, h).to(BF16), *routed(9, 1, 2), layer(2, h, 64, 32))


def test_arguments_that_no_kernel_takes():
    parts, x, (ids, w) = layer(2, 256, 256), torch.randn(3, 256).to(BF16), routed(3, 2, 2)
    narrow = (*sparse(2, 256, 192)[:3], *parts[3:8], sparse(2, 256, 192)[3], None)
    for changed in (dict(tile=(3, 1, 1, 1, 1, 2, 1)), dict(tile=(2, 2, 4, 2, 2, 4, 3)), dict(space=1024), dict(x=x[:, :192], parts=narrow)):
        with pytest.raises(EmulatorError, match="status"):
            run(emulated(SOURCE), **{**dict(x=x, ids=ids, w=w, parts=parts), **changed})


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
CAUGHT = [
    ("SKIP_FULL_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("SKIP_TOKENS_WAIT", "before its asynchronous copy was waited for|nobody wrote"),
    ("SKIP_SUMS_WAIT", "race|nobody wrote"),
    ("SKIP_SUMS_FREE_WAIT", "race"),
    ("H_PAST_I_NOT_CLEARED", None),
    ("EVERY_TOKEN_IS_ROUTED", "nobody wrote|before its asynchronous copy"),
    ("SCALES_BEGIN_ALIGNED", None),
    ("SKIP_SCALES_SWIZZLE", None),
    ("EARLIER_EXPERT_NOT_FOUND", None),
]


@pytest.mark.parametrize(("fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(fault, words):
    parts, x, w, kernel = layer(5, 320, 320, 72), torch.randn(8, 320).to(BF16), torch.rand(8, 5), emulated(SOURCE)
    ids = torch.arange(40).view(8, 5) // 10  # of the first tokens one expert, and pairs that a warp takes together end in the middle of one
    ids[7] = torch.tensor([0, 4, 2, 3, 4])
    args = x, ids, w, parts, SILU, None, (2, 2, 2, 2, 2, 4, 1)
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, *args), x, ids, w, parts), 0.01)
