"""Run by test_decode_attention.py in a process of its own: attention of many queries over a shared mask, in Triton's interpreter, against float64.

In float16: the interpreter's bfloat16 ``tl.dot`` is wrong. Prints as ``interpreted.py``.
"""

from __future__ import annotations

from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.kernels import host
from fp4_inductor.kernels.cached_attention.prefill import PrefillConfig
from fp4_inductor.kernels.decode_attention import masked as kernel
from fp4_inductor.kernels.decode_attention.triton_masked import ALL, NONE, SOME, WORD, pack_mask
from fp4_inductor.ops import decode_attention as contract

SMALL = PrefillConfig(32, 16)
# B, H, Hkv, Q, S, D: tiles and blocks that do not come out even, one query, one key
SHAPES = ((2, 4, 2, 70, 330, 64), (1, 6, 2, 33, 197, 40), (1, 4, 4, 64, 64, 128), (3, 2, 1, 17, 40, 80), (1, 2, 2, 1, 33, 64), (1, 2, 1, 40, 1, 64))


def _left_over(*shape, dtype, **options):
    """For ``torch.empty`` in the launcher: what a block of memory may hold."""
    return torch.full(shape, 7, dtype=dtype) if not dtype.is_floating_point else interpreted._float32_out(*shape, dtype=dtype, **options)


def run(query, key, value, mask, scale=None, tile=SMALL):
    with mock.patch.object(host, "arch", return_value=80), mock.patch.object(torch, "empty", _left_over):
        return kernel.masked(query, key, value, mask, contract.scale_of(query, scale), tile)


def operands(b, h, kv, q, s, d):
    return [torch.randn(shape).half() for shape in ((b, h, q, d), (b, kv, s, d), (b, kv, s, d))]


def masks(b, q, s):
    """Of a prompt, of a chunk behind others, of a window, of padding on either side, with holes, and of rows and tiles without anything."""
    at, row = torch.arange(s), torch.arange(q)[:, None]
    causal = at <= row
    yield "causal", causal.expand(1, 1, q, s)
    behind = at <= max(0, s - q) + row
    yield "behind others", behind.expand(b, 1, q, s)
    yield "window", (behind & (at > max(0, s - q) + row - 20)).expand(1, 1, q, s)
    padding = torch.arange(b)[:, None, None, None] * 7
    yield "padded left", behind & (at >= padding)
    yield "padded right", behind & (at < s - padding)
    yield "holes", torch.rand(b, 1, q, s) < 0.5
    blocks = (at // 64 % 2 == 0).expand(b, 1, q, s).clone()
    blocks[0, :, 0] = False
    yield "every other block", blocks
    yield "two runs of whole blocks", ((at < 64) | (at >= 192)).expand(1, 1, 1, s)
    yield "everything", torch.ones(1, 1, q, s, dtype=torch.bool)
    yield "nothing", torch.zeros(b, 1, 1, s, dtype=torch.bool)
    yield "one key", at.eq(s - 1).expand(1, 1, q, s)
    yield "by columns", (torch.rand(s, q) < 0.5).t().expand(b, 1, q, s)


def check(case, operands, mask, scale=None, tile=SMALL):
    want = contract.reference(*(t.float() for t in operands), mask, scale)
    got = run(*operands, mask, scale, tile)
    bound = contract.CONTRACT.tolerance[torch.float16] if want.norm() else 0.0
    interpreted.report(case, interpreted.distance(got, want), bound)


def cases(shapes=SHAPES, each=5):
    return interpreted.some(((shape, *mask) for shape in shapes for mask in masks(shape[0], *shape[3:5])), each)


def products():
    for shape, kind, mask in cases():
        check(f"masked {kind} {shape}", operands(*shape), mask)
    shape = SHAPES[0]
    for kind, mask in list(masks(shape[0], *shape[3:5]))[:3]:
        check(f"masked {kind}, another tile", operands(*shape), mask, tile=PrefillConfig(64, 32))
        check(f"masked {kind}, negative scale", operands(*shape), mask, scale=-0.3)
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands(*shape))
        check(f"masked {kind}, strides", [query, key, value], mask)


def unread():
    """What no query attends to may hold anything."""
    for shape, kind, mask in cases(SHAPES[:3]):
        query, key, value = operands(*shape)
        clean = run(query, key, value, mask)
        unseen = ~mask.expand(shape[0], 1, *shape[3:5]).any(2)[:, 0]
        key, value = (t.masked_fill(unseen[:, None, :, None], float("nan")) for t in (key, value))
        interpreted.report(f"unread {kind} {shape}", float(not torch.equal(run(query, key, value, mask), clean)), 0.0)


def packed():
    """A tile takes exactly the blocks of which the mask leaves something in."""
    for shape, kind, mask in cases(each=3):
        q, s = shape[3:5]
        full = mask.expand(mask.shape[0], 1, q, s)[:, 0]
        tiles, blocks = -(-q // 32), -(-s // WORD)
        found, seen = (torch.full((len(full), tiles, n), 9, dtype=torch.uint8) for n in (blocks, blocks * WORD))
        bits = torch.full((len(full), q, blocks), -1)
        pack_mask[(blocks, tiles, len(full))](full.view(torch.uint8), found, seen, bits, q, s, *full.stride(), BLOCK_M=32)
        parts = [[[rows[t * 32 : t * 32 + 32, n * WORD : n * WORD + WORD] for n in range(blocks)] for t in range(tiles)] for rows in full]
        want = torch.tensor([[[_kind(part) for part in tile] for tile in rows] for rows in parts])
        wide = torch.nn.functional.pad(full, (0, blocks * WORD - s))
        of_keys = torch.stack([torch.stack([part.any(0) for part in rows.split(32)]) for rows in wide])
        of_bits = (bits[..., None] >> torch.arange(WORD) & 1).bool().flatten(2)
        right = torch.equal(found.long(), want) and torch.equal(seen.bool(), of_keys) and torch.equal(of_bits, wide)
        interpreted.report(f"packed {kind} {shape}", float(not right), 0.0)


def _kind(part):
    return NONE if not part.any() else ALL if part.all() and part.shape[1] == WORD else SOME


if __name__ == "__main__":
    torch.manual_seed(0)
    products()
    unread()
    packed()
