"""Run by test_prompts.py in a process of its own: attention of many new tokens over a cache, in Triton's interpreter, against float64.

In float16: the interpreter's bfloat16 ``tl.dot`` is wrong. Prints as ``interpreted.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import kv
from fp4_inductor.kernels import host, select
from fp4_inductor.kernels.cached_attention import prefill as kernel
from fp4_inductor.kernels.cached_attention.prefill import SERVES, PrefillConfig
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels.interpreted import some
from lowering_tests.kernels.interpreted_append import parts
from lowering_tests.kernels.quantized_calls import call, fresh, turning

NAMES = ("bf16", *kv.FORMATS)
SMALL = PrefillConfig(32, 16)
SPLIT, PACKED = PrefillConfig(32, 16, parts=3), PrefillConfig(32, 16, packed=True, parts=5)


def dense_call(b, h, heads, q, s, d, at, window=None, sinks=False, prologue=None, **options) -> CachedCall:
    """As ``quantized_calls.call``, of a cache in the dtype of the query."""
    keys, values = torch.full((2, b, heads, s, d), float("nan")).half()
    held = torch.arange(max(0, at - s), at) % s
    keys[:, :, held], values[:, :, held] = torch.randn(2, b, heads, len(held), d).half()
    new = [torch.randn(b, n, q, d).half() for n in (h, heads, heads)]
    sink = torch.randn(h).half() if sinks else None
    return CachedCall(*new, keys, values, torch.tensor(at), window=window, sinks=sink, prologue=prologue, **options)


def make(name, *shape, **options) -> CachedCall:
    return dense_call(*shape, **options) if name == "bf16" else call(name, *shape, **options)


def copied(c: CachedCall) -> CachedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone()) if c.stored is None else fresh(c)


def _left_over(*shape, dtype, **options):
    """For ``torch.empty`` in the launchers. Parts have a large number, which as the maximum of one would hide all others, as NaN would not."""
    found = interpreted._float32_out(*shape, dtype=dtype, **options)
    return found.fill_(1e30) if dtype == torch.float32 else found


def run(c, tile=SMALL, known=True):
    """``known``: the caller knows that an empty cache is empty, as on a GPU."""
    asked = select.cached_form(c)
    assert set(asked) <= set(SERVES), asked
    blind = mock.patch.object(kernel, "known", return_value=None)
    with mock.patch.object(host, "arch", return_value=80), mock.patch.object(torch, "empty", _left_over):
        if known:
            return kernel.prefill(c, tile)
        with blind:
            return kernel.prefill(c, tile)


def check(case, c, tile=SMALL, known=True):
    """The result, and what is written."""
    ours, theirs = copied(c), copied(c)
    got = run(ours, tile, known)
    mean = kv.mean_of(c.prepared().key) if ours.stored is None else ours.stored.key_mean
    with mock.patch.object(kv, "mean_of", return_value=mean):  # summed in another order, it would round a few keys differently
        want = contract.CONTRACT.reference(*theirs.flat())
    interpreted.report(f"prefill {case}", interpreted.distance(got, want), contract.CONTRACT.tolerance[torch.float16])
    if c.prologue is None:
        pairs = [(ours.keys, theirs.keys), (ours.values, theirs.values)] if c.stored is None else zip(parts(ours), parts(theirs), strict=True)
        wrong = sum(int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()) for a, b in pairs)
        interpreted.report(f"written {case}", float(wrong), 0.0)
    return got


def positions():
    """Empty, known to be or not; a chunk behind any number of tokens: the edges of tiles, of the first and of the last exact tokens."""
    for name, q, known in some(itertools.product(NAMES, (17, 64, 150), (True, False)), 5):
        check(f"{name} empty Q {q} known {known}", make(name, 1, 4, 2, q, 160, 32, 0), SMALL, known)
    for at, q, name in some(itertools.product((1, 4, 15, 63, 64, 68), (18, 70), NAMES), 5):
        check(f"{name} {q} at {at}", make(name, 1, 2, 1, q, 200, 32, at))
    for name, tile in some(itertools.product(NAMES, (PrefillConfig(16, 64), PrefillConfig(64, 32), PrefillConfig(128, 16))), 5):
        check(f"{name} {tile.block_m} {tile.block_n}", make(name, 2, 4, 2, 140, 300, 32, 77), tile)


def shapes():
    for d, name in some(itertools.product((16, 48, 64, 80, 128, 256), NAMES), 3):
        check(f"{name} D {d}", make(name, 1, 2, 1, 33, 120, d, 80))
    for name, group in some(itertools.product(NAMES, (1, 7)), 3):
        check(f"{name} group {group}", make(name, 2, 2 * group, 2, 20, 90, 32, 41))


def windows():
    """Fewer and more new tokens than the ring keeps; windows within the exact tokens and beyond."""
    cases = ((20, 20, 18), (20, 9, 50), (90, 80, 100), (80, 70, 11), (180, 150, 40))
    for name, at, (slots, window, q) in some(itertools.product(NAMES, (0, 47, 1000), cases), 4):
        check(f"{name} ring {slots} of {window} at {at} Q {q}", make(name, 1, 2, 1, q, slots, 32, at, window), SMALL, known=bool(at) or q > 20)


def options():
    for name, at, window in some(itertools.product(NAMES, (0, 80), (None, 77)), 3):
        shape = (name, 2, 2, 1, 40, 130, 32, at, window)
        check(f"{name} both at {at} window {window}", make(*shape, sinks=True, softcap=0.7, scale=0.3))
        for kind, first in (("left", torch.tensor([0, 7])), ("most", torch.tensor([at, 20])), ("all of one", torch.tensor([0, 999]))):
            mask = (torch.arange(130) >= first[:, None])[:, None, None]
            check(f"{name} padded {kind} at {at} window {window}", make(*shape, mask=mask))
        check(f"{name} rotated at {at} window {window}", make(*shape, prologue=turning(2, 40, 32)))
        check(f"{name} scale -0.3 at {at} window {window}", make(*shape, scale=-0.3))
    for name in some(NAMES, 3):
        check(f"{name} soft-cap", make(name, 1, 2, 1, 20, 60, 32, 30, softcap=1.5))
        check(f"{name} scale 0", make(name, 1, 2, 1, 20, 60, 32, 30, scale=0.0))


def split():
    """Parts of the keys that begin in each of the loops, that have no keys, and rows of several heads in a tile."""
    with mock.patch.object(kernel, "_LEAST", 1):
        for name, at in some(itertools.product(NAMES, (0, 61, 330)), 5):
            check(f"{name} at {at} split", make(name, 1, 4, 2, 40, 400, 32, at), SPLIT, known=bool(at))
            check(f"{name} at {at} packed", make(name, 2, 6, 2, 3, 400, 32, at), PACKED, known=bool(at))
        for name in some(NAMES, 3):
            check(f"{name} ring split", make(name, 1, 4, 2, 21, 220, 32, 1000, 180, sinks=True, softcap=0.7), SPLIT)
            check(f"{name} window within the exact tokens split", make(name, 1, 4, 2, 21, 100, 32, 300, 33), PACKED)
            mask = (torch.arange(400) >= torch.tensor([200, 999])[:, None])[:, None, None]
            check(f"{name} padded split", make(name, 2, 4, 2, 21, 400, 32, 300, mask=mask, sinks=True), PACKED)
            check(f"{name} D 80 split", make(name, 1, 4, 2, 21, 200, 80, 150, scale=-0.3), PACKED)
    for name in some(NAMES, 3):
        check(f"{name} packed alone", make(name, 2, 14, 2, 33, 200, 32, 90), PrefillConfig(32, 16, packed=True))
        check(f"{name} many parts", make(name, 1, 4, 2, 18, 200, 32, 90), PrefillConfig(32, 16, parts=9))


def same():
    """The bits of a row are those of a shorter call, and without exact tokens those of a chunk that begins elsewhere."""
    for name in NAMES:
        c = make(name, 1, 4, 2, 90, 160, 32, 30)
        whole, cache = run(copied(c)), copied(c)
        for begin, end in ((0, 37), (37, 90)):
            chunk = cache._replace(position=torch.tensor(30 + begin), **{part: getattr(c, part)[:, :, begin:end] for part in ("query", "key", "value")})
            if begin == 0 or name != "nvfp4":
                interpreted.report(f"same {name} {begin}", float(not torch.equal(run(chunk), whole[:, begin:end])), 0.0)


def unusual():
    """NaN and Inf stay in their head; queries in tiles before theirs do not see them, those behind do."""
    for name, number, which in some(itertools.product(NAMES, (float("nan"), float("inf")), ("key", "value")), 3):
        tile = SMALL if which == "key" else replace(SPLIT, packed=True)
        c = make(name, 1, 4, 2, 50, 80, 32, 30)
        clean = run(copied(c), tile)
        getattr(c, which)[0, 1, 38, 3] = number
        got = run(copied(c), tile)
        inside = torch.equal(got[:, :, :2], clean[:, :, :2]) and torch.equal(got[:, :32, 2:], clean[:, :32, 2:])
        seen = (which == "key" and number == float("inf")) or bool((~got[:, 38:, 2:].isfinite()).any(-1).all())  # a key of Inf may have a score of -Inf
        interpreted.report(f"unusual {name} {number} in {which}", float(not (inside and seen)), 0.0)


def full():
    """No room: nothing is written, and the result is NaN."""
    for name, at, tile in some(itertools.product(kv.FORMATS, (-1, 71, 100), (SMALL, PACKED)), 5):
        c = call(name, 1, 4, 2, 30, 100, 32, 40)._replace(position=torch.tensor(at))
        before = fresh(c)
        got = run(c, tile, known=False)
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts(before), parts(c), strict=True))
        interpreted.report(f"full {name} at {at} parts {tile.parts}", float(not (same and got.isnan().all())), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for cases in (positions, shapes, windows, options, split, same, unusual, full):
        cases()
