"""Run by test_prompts.py in a process of its own: fp4.append_kv and fp4.dequantize_kv for many tokens, in Triton's interpreter, bit for bit.

Prints as ``interpreted.py``. The mean of keys is summed in another order than torch's; what follows from the mean that was written has to be equal.
"""

from __future__ import annotations

import itertools
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import kv
from fp4_inductor.kernels.cached_attention import append
from fp4_inductor.kernels.cached_attention.append import Numbers, RowsConfig
from fp4_inductor.ops import append_kv, dequantize_kv
from fp4_inductor.ops.cached_call import CachedCall, Stored
from lowering_tests.kernels.interpreted import some
from lowering_tests.kernels.quantized_calls import NAN, call, fresh

FORMATS = tuple(kv.FORMATS)


def parts(c: CachedCall) -> list[torch.Tensor]:
    return [t for t in (c.keys, c.values, *c.stored) if t is not None]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def different(ours, theirs) -> float:
    """How many bytes."""
    return float(sum(int((bits(a) != bits(b)).sum()) for a, b in zip(ours, theirs, strict=True)))


def check(case, c, tile=None):
    """What is written and returned has the bits of the reference, given the mean that was written; that one is close to the reference's."""
    ours, theirs = fresh(c), fresh(c)
    got = Numbers(*append._rows_like(ours, c.key.shape[2]), back=0)
    for t in got[:2]:
        t.fill_(7.0)
    append.append(ours, got, tile)
    if int(c.position) == 0:
        interpreted.report(f"mean {case}", interpreted.distance(ours.stored.key_mean, kv.mean_of(c.key)), 1e-6)
    with mock.patch.object(kv, "mean_of", return_value=ours.stored.key_mean):
        want = append_kv.CONTRACT.reference(*append_kv.AppendCall.flat_of(theirs))
    interpreted.report(f"written {case}", different(parts(ours), parts(theirs)), 0.0)
    # Sums with the mean may be NaN with another sign.
    interpreted.report(f"returned {case}", different([t.nan_to_num(9.0) for t in got[:2]], [t.nan_to_num(9.0) for t in want]), 0.0)
    return ours


def shapes():
    """All widths; tiles that end inside and at the end; empty caches, caches with old tokens, full to the last slot."""
    for name, d, q, at in some(itertools.product(FORMATS, (64, 128, 256), (1, 37), (0, 5)), 5):
        check(f"{name} D {d} Q {q} at {at}", call(name, 2, 2, 2, q, at + q + 3 * (d == 64), d, at))
    for name, d in some(itertools.product(FORMATS, (16, 48, 80)), 2):
        check(f"{name} D {d}", call(name, 1, 1, 1, 19, 40, d, 11), RowsConfig(16))
    for name, q in some(itertools.product(FORMATS, (127, 128, 129, 200)), 3):
        check(f"{name} mean of {q}", call(name, 1, 2, 2, q, q, 32, 0), RowsConfig(32))
    for name, dtype in itertools.product(FORMATS, (torch.float32, torch.float16)):
        check(f"{name} {dtype}", call(name, 1, 2, 2, 70, 80, 32, 3, dtype=dtype), RowsConfig(32))


def rings():
    """Fewer and more tokens than the ring has slots, before and after its first turn; exact tokens whose ring turns, too."""
    for name, at, (slots, window, q) in some(itertools.product(FORMATS, (0, 3, 20, 1000), ((20, 20, 5), (24, 20, 24), (20, 9, 100), (90, 80, 150))), 5):
        check(f"{name} ring {slots} of {window} at {at} Q {q}", call(name, 1, 2, 2, q, slots, 32, at, window), RowsConfig(16))


def layouts():
    """New tokens as they left one product of q, k and v: heads apart."""
    for name in FORMATS:
        c = call(name, 2, 2, 2, 21, 40, 32, 7)
        apart = [torch.randn(2, 21, 3, 32).half().transpose(1, 2)[:, :2] for _ in range(2)]
        check(f"{name} strides", c._replace(query=apart[0], key=apart[0], value=apart[1]), RowsConfig(16))
        stored = Stored(*(None if t is None else t.mT.contiguous().mT for t in c.stored))
        check(f"{name} strides of the cache", c._replace(keys=c.keys.mT.contiguous().mT, stored=stored), RowsConfig(16))


def unusual():
    for name, number in itertools.product(FORMATS, (NAN, float("inf"), -float("inf"))):
        for at in (0, 40):
            c = call(name, 1, 2, 2, 30, 100, 32, at)
            c.key[0, 1, 3, 5], c.value[0, 0, 29, 31], c.key[0, 0, 8], c.value[0, 1, 9] = number, number, 0.0, 0.0
            check(f"{name} {number} at {at}", c, RowsConfig(16))
    for name, factor in itertools.product(FORMATS, (1e-7, 3e4)):
        c = call(name, 1, 2, 2, 30, 100, 32, 9, dtype=torch.float32)
        c = c._replace(key=c.key * factor, value=c.value * factor * 100)
        check(f"{name} times {factor}", c._replace(query=c.key), RowsConfig(16))


def full():
    """No room: nothing is written, and all that is returned is NaN."""
    for name, at in itertools.product(FORMATS, (-1, 71, 100)):
        c = call(name, 1, 2, 2, 30, 100, 32, 40)._replace(position=torch.tensor(at))
        before, got = fresh(c), Numbers(*append._rows_like(c, 30), back=0)
        append.append(c, got)
        interpreted.report(f"full {name} at {at}", different(parts(before), parts(c)) + float(not all(t.isnan().all() for t in got[:2])), 0.0)


def dequantize():
    """The op on CUDA, and the rows that a prompt reads: old tokens by position, the new ones behind them, exact ones beside."""
    for name, d, slots in some(itertools.product(FORMATS, (16, 64, 80, 128, 256), (None, 33)), 3):
        c = call(name, 2, 2, 2, 1, 50, d, 50)
        asked = append._as_stored(c)._replace(slots=slots)
        interpreted.report(f"dequantize {name} D {d} {slots}", different(append.slots_of(asked), dequantize_kv.reference(asked)), 0.0)
    prompts = ((0, 9, 80, None), (40, 30, 80, None), (70, 90, 170, None), (50, 40, 24, 20), (5, 40, 24, 20))
    for name, (at, q, slots, window) in some(itertools.product(FORMATS, prompts), 2):
        c = call(name, 2, 2, 2, q, slots, 32, at, window)
        s, f = c.stored, c.format
        to = append.memory(c, False, f.exact)
        want = []
        for kind, rows, exact, mean in zip((f.key, f.value), c.rows(), (s.exact_keys, s.exact_values), (s.key_mean, None), strict=True):
            old = torch.arange(max(0, at - window + 1) if window else 0, at)
            dense = kv.dequantize(rows.each(lambda t, old=old % slots: kv.indexable(t)[:, :, old].view(t.dtype)), kind, mean).half()
            if f.exact:
                dense[:, :, old < kv.FIRST] = exact[:, :, old[old < kv.FIRST]]
            want.append((old, dense))
        near_old = torch.arange(max(0, at - kv.LAST + 1), at)
        near = [exact[:, :, kv.exact_slot(near_old, exact.shape[2])] for exact in (s.exact_keys, s.exact_values) if exact is not None]
        append.dequantize(c, to, RowsConfig(16))
        wrong = 0.0
        for (old, dense), got in zip(want, to[:2], strict=True):
            wrong += different([got[:, :, old if to.back is None else old - at + to.back]], [dense])
        for exact, got in zip(near, (to.near_keys, to.near_values), strict=False):
            wrong += different([got[:, :, near_old - at + to.near_back].nan_to_num(9.0)], [exact.nan_to_num(9.0)])
        interpreted.report(f"old {name} at {at} Q {q} window {window}", wrong, 0.0)
        theirs = fresh(c)
        append.append(c, to, RowsConfig(16))
        with mock.patch.object(kv, "mean_of", return_value=c.stored.key_mean):
            rounded = append_kv.CONTRACT.reference(*append_kv.AppendCall.flat_of(theirs))
        wrong = different(parts(c), parts(theirs))
        first = (torch.arange(at, at + q) < kv.FIRST)[:, None] & f.exact
        row = torch.arange(q) + (at if to.back is None else to.back)
        for got, numbers, raw in zip(to[:2], rounded, (c.key, c.value), strict=True):
            wrong += different([got[:, :, row]], [torch.where(first, raw, numbers)])
        for got, raw in zip((to.near_keys, to.near_values) if f.exact else (), (c.key, c.value), strict=False):
            wrong += different([got[:, :, to.near_back :]], [raw])
        interpreted.report(f"new {name} at {at} Q {q} window {window}", wrong, 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for cases in (shapes, rings, layouts, unusual, full, dequantize):
        cases()
