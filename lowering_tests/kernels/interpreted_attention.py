"""Run by test_decode_attention.py in a process of its own: fp4.decode_attention's kernels in Triton's interpreter, on CPU tensors.

In float16 and float32: the interpreter's bfloat16 ``tl.dot`` is wrong. Prints as ``interpreted.py``.
"""

from __future__ import annotations

import itertools
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.kernels import host
from fp4_inductor.kernels.decode_attention import split as kernel
from fp4_inductor.kernels.decode_attention.split import AttentionConfig
from fp4_inductor.ops import decode_attention as contract

NAN = float("nan")


def run(query, key, value, mask=None, scale=None, tile=None, position=None, scales=()):
    with (
        mock.patch.object(host, "arch", return_value=80),
        mock.patch.object(host, "processors", return_value=4),
        mock.patch.object(torch, "empty", interpreted._float32_out),
    ):
        return kernel.split(query, key, value, mask, contract.scale_of(query, scale), tile, position, *scales)


def operands(b, h, kv, q, s, d, dtype=torch.float16):
    return (torch.randn(shape).to(dtype) for shape in ((b, h, q, d), (b, kv, s, d), (b, kv, s, d)))


def check(case, query, key, value, mask=None, scale=None, tile=None):
    got = run(query, key, value, mask, scale, tile)
    wide = [t.float() for t in (query, key, value)]
    want = contract.reference(*wide, mask, scale)
    bound = contract.CONTRACT.tolerance[query.dtype] if want.numel() and want.norm() else 0.0
    interpreted.report(f"attention {case}", interpreted.distance(got, want), bound)
    return got


def masks(b, h, q, s):
    """Every kind: of Transformers (filled to some length, causal among the queries), with holes, per head, added; rows and tiles without a position."""
    at = torch.arange(s)
    filled = (at <= s // 2 - q + torch.arange(q)[:, None]).expand(b, 1, q, s)
    yield "filled", filled
    yield "padded left", filled & (at >= s // 4)
    yield "holes", torch.rand(b, 1, q, s) < 0.5
    yield "per head", torch.rand(b, h, q, s) < 0.5
    tiles = (at // 32 % 2 == 0).expand(b, 1, q, s).clone()
    tiles[0, :, 0] = False
    yield "tiles and a row without", tiles
    yield "nothing", torch.zeros(1, 1, 1, s, dtype=torch.bool)
    yield "one position", at.eq(s - 1).expand(1, 1, q, s)
    yield "added", torch.randn(b, 1, q, s).masked_fill(torch.rand(b, 1, q, s) < 0.4, float("-inf")).half()
    yield "least numbers", torch.zeros(b, 1, q, s).masked_fill(torch.rand(b, 1, q, s) < 0.4, torch.finfo(torch.float32).min)
    least = torch.full((b, 1, q, s), torch.finfo(torch.float32).min)
    yield "least numbers only", least


def shapes():
    for group in (1, 2, 4, 7, 8):
        for d in (64, 80, 128):
            check(f"group {group} D {d}", *operands(2, 2 * group, 2, 1, 100, d), tile=AttentionConfig(32, 1 + group % 3))
    for d in (8, 40, 96, 256):
        check(f"D {d}", *operands(1, 4, 2, 1, 70, d))
    for q in (2, 3, 8):
        check(f"{q} queries", *operands(1, 4, 2, q, 70, 64), scale=0.5)
    for s in (1, 15, 16, 31, 33, 64, 257):
        for splits in (1, 3, 5):
            check(f"S {s} in {splits}", *operands(1, 4, 2, 1, s, 64), tile=AttentionConfig(32, splits))
    check("float32", *operands(2, 8, 2, 1, 100, 64, torch.float32))


def masked():
    shapes = ((2, 4, 2, 1, 150), (1, 6, 2, 3, 97), (2, 4, 4, 1, 200))
    cases = ((shape, *mask, splits) for shape in shapes for mask in masks(*shape[:2], *shape[3:]) for splits in (1, 4))
    for shape, kind, mask, splits in interpreted.some(cases, 3):
        check(f"mask {kind} {shape} in {splits}", *operands(*shape, 64), mask, tile=AttentionConfig(32, splits))
    # A mask too long to be read whole by every program: each reads its part's.
    with mock.patch.object(kernel, "_SCANNED", 128):
        for kind, mask in masks(2, 4, 1, 700):
            check(f"long mask {kind}", *operands(2, 4, 2, 1, 700, 64), mask, tile=AttentionConfig(32, 3))


def unread():
    """What no row attends to may hold anything: it is the first thing that a freed block of memory holds."""
    for b, h, kv, q, s in ((2, 4, 2, 1, 150), (1, 6, 2, 3, 97)):
        for kind, mask in masks(b, h, q, s):
            query, key, value = operands(b, h, kv, q, s, 64)
            clean = run(query, key, value, mask, tile=AttentionConfig(32, 3))
            seen = (mask if mask.dtype == torch.bool else mask > float("-inf")).expand(b, h, q, s)
            seen = seen.unflatten(1, (kv, h // kv)).any(2).any(2)
            for bad in (NAN, float("inf")):
                key[~seen], value[~seen] = bad, bad
                got = run(query, key, value, mask, tile=AttentionConfig(32, 3))
                interpreted.report(f"unread {bad} {kind} {(b, h, kv, q, s)}", float(not torch.equal(got, clean)), 0.0)


def counted():
    """A position in the place of a mask: causal, and what lies behind the last query may hold anything."""
    for b, h, kv, q, s, at in ((2, 4, 2, 1, 150, 0), (2, 4, 2, 1, 150, 70), (1, 6, 2, 3, 97, 94), (2, 8, 2, 4, 200, 31), (1, 16, 1, 1, 33, 32)):
        for splits in (1, 3, 5):
            query, key, value = operands(b, h, kv, q, s, 64)
            mask = (torch.arange(s) <= at + torch.arange(q)[:, None]).expand(1, 1, q, s)
            want = contract.reference(*(t.float() for t in (query, key, value)), mask)
            key[:, :, at + q :], value[:, :, at + q :] = NAN, NAN
            got = run(query, key, value, tile=AttentionConfig(32, splits), position=torch.tensor(at))
            interpreted.report(f"counted {(b, h, kv, q, s, at)} in {splits}", interpreted.distance(got, want), contract.CONTRACT.tolerance[query.dtype])
            same = run(query, key[:, :, : at + q], value[:, :, : at + q], mask[..., : at + q], tile=AttentionConfig(32, 1))
            if splits == 1:
                interpreted.report(f"counted as masked {(b, h, kv, q, s, at)}", interpreted.distance(got, same.float()), 1e-3)
    query, key, value = operands(2, 4, 2, 1, 100, 64)
    for at in (-1, 200):  # nothing, and no further than the cache is long
        seen = max(0, min(at + 1, 100))
        want = contract.reference(*(t.float() for t in (query, key, value)), (torch.arange(100) < seen)[None, None, None])
        interpreted.report(f"counted at {at}", interpreted.distance(run(query, key, value, position=torch.tensor(at)), want), 1e-3 if seen else 0.0)
    long = [run(query, key, value, tile=AttentionConfig(32, n), position=torch.tensor(99)) for n in (1, 4)]
    for n, got in enumerate(long):
        want = contract.reference(*(t.float() for t in (query, key, value)))
        interpreted.report(f"counted to the end {n}", interpreted.distance(got, want), contract.CONTRACT.tolerance[query.dtype])


def coded(b, kv, s, d, kind, lead=None):
    """Every code that is a number, and scales ``[*lead, 1]``, by default one for each token and head; zero of one token, and from 1e-4 to 1e4."""
    byte = torch.randint(0, 256, (b, kv, s, d), dtype=torch.uint8)
    codes = torch.where(byte & 0x7F == 0x7F, 0x40, byte).view(kind)
    scale = 10 ** (torch.rand(*(lead or (b, kv, s)), 1) * 2 - 3)
    if lead is None:
        scale[:, :, s // 2] = 0.0
    return codes, scale


def codes():
    int8, fp8 = contract.CODES
    shapes = ((2, 8, 2, 1, 100, 64, None), (1, 6, 3, 3, 97, 80, (1, 3, 1)), (2, 4, 4, 2, 70, 128, (1, 1, 1)), (1, 7, 1, 1, 33, 256, None))
    for (of_key, of_value), (b, h, kv, q, s, d, lead) in itertools.product(((int8, int8), (fp8, fp8), (int8, fp8)), shapes):
        query = torch.randn(b, h, q, d).half()
        (key, ks), (value, vs) = coded(b, kv, s, d, of_key, lead), coded(b, kv, s, d, of_value, lead)
        ks, vs = ks / d**0.5, vs * (1e3 if d == 80 else 0.1)  # values that do not fit float16 if a weight is multiplied by their scale, and small ones
        every = list(masks(b, h, q, s)) if d == 64 and of_key == int8 else [next(masks(b, h, q, s))]
        for kind, mask in [("none", None), *every]:
            got = run(query, key, value, mask, None, AttentionConfig(32, 3), None, (ks, vs))
            want = contract.reference(query.float(), key, value, mask, None, ks, vs)
            bound = contract.CONTRACT.tolerance[torch.float16] if want.norm() else 0.0
            interpreted.report(f"codes {of_key} {of_value} {kind} {(b, h, kv, q, s, d)}", interpreted.distance(got, want), bound)
        if of_key == fp8 and d == 256:
            key.view(torch.uint8)[0, 0, 5, 3] = 0x7F
            got = run(query, key, value, None, None, AttentionConfig(32, 3), None, (ks, vs))
            interpreted.report("codes NaN", float(not bool(got.isnan().all())), 0.0)
            mask = (torch.arange(33) != 5)[None, None, None]
            got = run(query, key, value, mask, None, AttentionConfig(32, 3), None, (ks, vs))
            interpreted.report("codes NaN that nobody attends to", float(bool(got.isnan().any())), 0.0)


def strided():
    query, key, value = operands(2, 8, 2, 1, 90, 64)
    want = run(query, key, value)
    longer = torch.full((2, 2, 128, 64), NAN).half()
    longer[:, :, :90] = key
    turned = value.transpose(1, 2).contiguous().transpose(1, 2)
    q = query.transpose(1, 2).contiguous().transpose(1, 2)
    interpreted.report("strided slices of caches", float(not torch.equal(run(q, longer[:, :, :90], turned), want)), 0.0)
    columns = key.mT.contiguous().mT
    interpreted.report("strided columns", float(not torch.equal(run(query, columns, value), want)), 0.0)
    mask = torch.rand(2, 1, 1, 90) < 0.5
    wide = torch.zeros(2, 1, 1, 180, dtype=torch.bool)
    wide[..., ::2] = mask
    interpreted.report("strided mask", float(not torch.equal(run(query, key, value, wide[..., ::2]), run(query, key, value, mask))), 0.0)


def kept_apart():
    """NaN in one sequence's cache, or in one query, stays there."""
    query, key, value = operands(3, 4, 2, 1, 60, 64)
    clean = run(query, key, value)
    key[1, 0, 5] = NAN
    got = run(query, key, value)
    others = torch.equal(got[[0, 2]], clean[[0, 2]]) and torch.equal(got[1, :, 2:], clean[1, :, 2:])
    interpreted.report("apart: a key", float(not (others and bool(got[1, :, :2].isnan().all()))), 0.0)
    query[0, 3] = NAN
    again = run(query, key, value)
    interpreted.report("apart: a query", float(not (torch.equal(again[0, :, :3], got[0, :, :3]) and bool(again[0, :, 3].isnan().all()))), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shapes()
    masked()
    unread()
    counted()
    codes()
    strided()
    kept_apart()
