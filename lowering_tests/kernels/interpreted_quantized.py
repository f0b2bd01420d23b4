"""Run by test_quantized_attention.py in a process of its own: fp4.cached_attention's one launch over a cache in 8 or 4 bits, in Triton's interpreter.

In float16: the interpreter's bfloat16 ``tl.dot`` is wrong. Prints as ``interpreted.py``.
"""

from __future__ import annotations

import itertools
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import kv
from fp4_inductor.kernels import host, select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS, cache_in
from fp4_inductor.kernels.cached_attention import quantized as kernel
from fp4_inductor.kernels.cached_attention.step import StepConfig
from fp4_inductor.ops import cached_attention as contract
from lowering_tests.kernels.interpreted import some
from lowering_tests.kernels.quantized_calls import NAN, call, fresh, numbers, turning

FORMATS = tuple(kv.FORMATS)


def run(c, tile=None):
    assert set(select.cached_form(c)).difference(NOT_BY_CLUSTERS) == {cache_in(c.format.name)}, select.cached_form(c)
    with (
        mock.patch.object(host, "arch", return_value=80),
        mock.patch.object(host, "processors", return_value=4),
        mock.patch.object(torch, "empty", interpreted._float32_out),
    ):
        return kernel.quantized(c, tile)


def check(case, c, tile=None, written=1e-6):
    """Against float64: the result, what was written, and that the counters are zero again. Twice: the same bits."""
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    got = run(ours, tile)
    interpreted.report(f"quantized {case}", interpreted.distance(got, want), contract.CONTRACT.tolerance[c.query.dtype])
    interpreted.report(f"written {case}", max(interpreted.distance(a, b) for a, b in zip(numbers(ours), numbers(theirs), strict=True)), written)
    interpreted.report(f"counters {case}", float(c.arrivals.abs().sum()), 0.0)
    same = torch.equal(run(again, tile).nan_to_num(9.0), got.nan_to_num(9.0)) and all(map(torch.equal, numbers(again), numbers(ours)))
    interpreted.report(f"again {case}", float(not same), 0.0)
    return got


def positions():
    """Empty, one token, the edges of tiles, of parts and of the exact tokens, full to the last slot; parts without a position."""
    for at, splits, name in some(itertools.product((0, 1, 3, 4, 15, 32, 67, 68, 69, 100, 133, 149), (1, 3), FORMATS), 5):
        check(f"{name} at {at} in {splits}", call(name, 1, 4, 2, 1, 150, 32, at), StepConfig(32, splits, 16))
    for name, at in some(itertools.product(FORMATS, (0, 5, 66, 142)), 3):
        check(f"{name} 8 queries at {at}", call(name, 2, 4, 2, 8, 150, 32, at), StepConfig(32, 3, 32))


def shapes():
    for name, group in some(itertools.product(FORMATS, (1, 7, 16)), 2):
        check(f"{name} group {group}", call(name, 2, 2 * group, 2, 1, 90, 64, 80), StepConfig(32, 2, 16))
    for d, name in some(itertools.product((16, 48, 80, 128, 256), FORMATS), 2):
        check(f"{name} D {d}", call(name, 1, 4, 2, 1, 90, d, 83))
    for name, q in some(itertools.product(FORMATS, (2, 3, 5)), 2):
        check(f"{name} {q} queries", call(name, 1, 4, 2, q, 90, 32, 81, scale=0.3), StepConfig(16, 2, 16))


def rings():
    """Before, at and after their first turn, with as many new tokens as they keep."""
    for name, at, (slots, window, q) in some(itertools.product(FORMATS, (0, 8, 20, 47, 1000), ((20, 20, 1), (24, 20, 5), (90, 80, 4))), 4):
        check(f"{name} ring {slots} of {window} at {at} Q {q}", call(name, 1, 4, 2, q, slots, 32, at, window), StepConfig(16, 2, 16))


def options():
    for name, at, q in some(itertools.product(FORMATS, (0, 80), (1, 3)), 3):
        shape = (name, 2, 4, 2, q, 100, 32, at)
        tile = StepConfig(16, 2, 16)
        check(f"{name} sinks at {at} Q {q}", call(*shape, sinks=True), tile)
        check(f"{name} soft-cap at {at} Q {q}", call(*shape, softcap=1.5), tile)
        check(f"{name} both at {at} Q {q}", call(*shape, window=77, sinks=True, softcap=0.7), tile)
        for kind, first in (("left", torch.tensor([0, 7])), ("most", torch.tensor([at, 20])), ("all of one", torch.tensor([0, 999]))):
            mask = (torch.arange(100) >= first[:, None])[:, None, None]
            check(f"{name} padded {kind} at {at} Q {q}", call(*shape, mask=mask), tile)
        check(f"{name} rotated at {at} Q {q}", call(*shape, prologue=turning(2, q, 32)), tile, 1e-2)


def early():
    """Tiles requested before the wait are the tiles that are attended to."""
    for name, at, window, q in some(itertools.product(FORMATS, (0, 1, 80), (None, 75), (1, 3)), 5):
        check(f"{name} early at {at} window {window} Q {q}", call(name, 1, 4, 2, q, 100, 32, at, window, sinks=True, early=True), StepConfig(16, 2, 16))


def unusual():
    """Rows of zeros, tiny and huge numbers, NaN and Inf in one head of one token, keys with a large mean."""
    for name in FORMATS:
        c = call(name, 1, 4, 2, 2, 100, 32, 80)
        c.key[:, :, 0], c.value[:, :, 0] = 0.0, 0.0
        check(f"{name} zeros", c, StepConfig(16, 2, 16))
        c = call(name, 1, 4, 2, 2, 100, 32, 80)
        for factor in (1e-6, 3e3):
            check(f"{name} values times {factor}", c._replace(value=(c.value.float() * factor).half()), StepConfig(16, 2, 16), 1e-3)
        c = call(name, 1, 4, 2, 2, 100, 32, 0)
        check(f"{name} biased keys", c._replace(key=(c.key.float() + 60.0 * (torch.arange(32) % 16 == 3)).half()), StepConfig(16, 2, 16), 1e-2)
        for number, which in itertools.product((NAN, float("inf")), ("key", "value")):
            c = call(name, 1, 4, 2, 2, 100, 32, 80)
            getattr(c, which)[0, 1, 1, 3] = number
            got = run(fresh(c), StepConfig(16, 2, 16))
            clean = got.isfinite().all(-1)[0]  # [Q, H]: heads 2 and 3 belong to the second KV head
            inside = bool(clean[:, :2].all()) and (c.format.exact or not bool(clean[1, 2:].any()))  # an exact key of Inf may have a score of -Inf
            interpreted.report(f"unusual {name} {number} in {which}", float(not inside), 0.0)


def full():
    """No room: nothing is written, and the result is NaN, which samplers refuse."""
    for name, at, splits in some(itertools.product(FORMATS, (-1, 100, 98), (1, 3)), 5):
        c = call(name, 1, 4, 2, 3, 100, 32, 80)._replace(position=torch.tensor(at))
        before = fresh(c)
        got = run(c, StepConfig(16, splits, 16))
        same = all(map(torch.equal, numbers(before), numbers(c))) and bool(got.isnan().all())
        interpreted.report(f"full {name} {at} {splits}", float(not same), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    positions()
    shapes()
    rings()
    options()
    early()
    unusual()
    full()
