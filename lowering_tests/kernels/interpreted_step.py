"""Run by test_attention_step.py in a process of its own: fp4.cached_attention's one launch in Triton's interpreter, on CPU tensors.

In float16 and float32: the interpreter's bfloat16 ``tl.dot`` is wrong. Prints as ``interpreted.py``.
"""

from __future__ import annotations

import itertools
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.kernels import host, select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS
from fp4_inductor.kernels.cached_attention import step as kernel
from fp4_inductor.kernels.cached_attention.step import StepConfig
from fp4_inductor.ops import cached_attention as contract
from lowering_tests.kernels.interpreted import some
from lowering_tests.kernels.quantized_calls import plain_call as call
from lowering_tests.kernels.quantized_calls import turning

NAN = float("nan")
F16 = torch.float16


def run(c, tile=None):
    assert set(select.cached_form(c)) <= set(NOT_BY_CLUSTERS), select.cached_form(c)
    with (
        mock.patch.object(host, "arch", return_value=80),
        mock.patch.object(host, "processors", return_value=4),
        mock.patch.object(torch, "empty", interpreted._float32_out),
    ):
        return kernel.step(c, tile)


def check(case, c, tile=None, bound=None):
    """Against float64: the result, what was written, and that the counters are zero again. Twice: the same bits."""
    ours, again, theirs = (c._replace(keys=c.keys.clone(), values=c.values.clone()) for _ in range(3))
    flat = list(theirs.flat())
    want = contract.CONTRACT.reference(*flat)
    got = run(ours, tile)
    bound = bound or contract.CONTRACT.tolerance[c.query.dtype]
    interpreted.report(f"step {case}", interpreted.distance(got, want), bound)
    caches = [interpreted.distance(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values))]
    interpreted.report(f"written {case}", max(caches), 0.0 if c.prologue is None else 5e-4)
    interpreted.report(f"counters {case}", float(c.arrivals.abs().sum()), 0.0)
    same = torch.equal(run(again, tile), got) and torch.equal(again.keys.nan_to_num(9.0), ours.keys.nan_to_num(9.0))
    interpreted.report(f"again {case}", float(not same), 0.0)
    return got


def positions():
    """Empty, one token, the edges of tiles and of parts, full to the last slot; parts without a position."""
    for at, splits in some(itertools.product((0, 1, 15, 16, 31, 32, 33, 64, 95, 99), (1, 3, 5)), 2):
        check(f"at {at} in {splits}", call(1, 4, 2, 1, 100, 32, at), StepConfig(32, splits, 16))
    for at in (0, 5, 40, 92):
        check(f"8 queries at {at}", call(2, 4, 2, 8, 100, 32, at), StepConfig(32, 3, 32))


def shapes():
    for group in (1, 4, 7, 8, 16):
        check(f"group {group}", call(2, 2 * group, 2, 1, 70, 64, 50), StepConfig(32, 2, 16))
    check("MQA", call(3, 8, 1, 2, 70, 64, 41), StepConfig(32, 4, 16))
    for d in (8, 40, 80, 96, 256):
        check(f"D {d}", call(1, 4, 2, 1, 40, d, 33))
    for q in range(2, 8):
        check(f"{q} queries", call(1, 4, 2, q, 40, 32, 22, scale=0.3), StepConfig(16, 2, 16))
    check("float32", call(1, 4, 2, 3, 60, 32, 33, dtype=torch.float32), StepConfig(32, 2, 16))


def rings():
    """Before, at and after their first turn, with as many new tokens as they keep, and more slots than that."""
    shapes = ((20, 20, 1), (24, 20, 5), (40, 7, 4), (16, 1, 3))
    for at, (slots, window, q), splits in some(itertools.product((0, 3, 8, 20, 21, 47, 1000), shapes, (1, 2)), 3):
        check(f"ring {slots} of {window} at {at} Q {q} in {splits}", call(1, 4, 2, q, slots, 32, at, window), StepConfig(16, splits, 16))


def options():
    for at, splits, q in some(itertools.product((0, 30), (1, 3), (1, 3)), 3):
        shape = (2, 4, 2, q, 60, 32, at)
        tile = StepConfig(16, splits, 16)
        check(f"sinks at {at} in {splits} Q {q}", call(*shape, sinks=True), tile)
        check(f"soft-cap at {at} in {splits} Q {q}", call(*shape, softcap=1.5), tile)
        check(f"both at {at} in {splits} Q {q}", call(*shape, window=17, sinks=True, softcap=0.7), tile)
        for kind, first in (("left", torch.tensor([0, 7])), ("most", torch.tensor([at, 20])), ("all of one", torch.tensor([0, 999]))):
            mask = (torch.arange(60) >= first[:, None])[:, None, None]
            check(f"padded {kind} at {at} in {splits} Q {q}", call(*shape, mask=mask), tile, 2e-3)
            check(f"padded ring {kind} at {at} in {splits} Q {q}", call(*shape, mask=mask[:1], window=20, sinks=True), tile, 2e-3)


def prologues():
    widths = ((32, 32), (64, 64), (48, 32), (40, 24))
    for (b, q), norm, half, (d, rotary) in some(itertools.product(((1, 1), (2, 3)), (True, False), (True, False), widths), 3):
        c = call(2, 4, 2, q, 40, d, 33, prologue=turning(b, q, d, norm=norm, rotary=rotary, half=half, offset=float(half)))
        check(f"prologue {(b, q)} norm {norm} half {half} D {d} of {rotary}", c, StepConfig(16, 2, 16), 2e-3)
    norms = turning(1, 1, 32)
    for prologue in (norms._replace(cos=None, sin=None, rotary=None), norms._replace(k_norm=None), norms._replace(q_norm=None)):
        check(f"prologue {[t is not None for t in prologue]}", call(1, 4, 2, 1, 40, 32, 20, prologue=prologue), StepConfig(16, 2, 16), 2e-3)


def early():
    """Tiles requested before the wait are the tiles that are attended to: the same bits."""
    for at, window, q, splits in some(itertools.product((0, 1, 16, 40), (None, 20), (1, 3), (1, 2, 3)), 5):
        c = call(1, 4, 2, q, 60, 32, at, window, sinks=True)
        got = check(f"early at {at} window {window} Q {q} in {splits}", c._replace(early=True), StepConfig(16, splits, 16))
        late = run(c._replace(keys=c.keys.clone(), values=c.values.clone()), StepConfig(16, splits, 16))
        interpreted.report(f"late {at} {window} {q} {splits}", interpreted.distance(got, late), 5e-4)


def strided():
    """The new tokens as parts of one product, the caches as parts of a longer buffer."""
    for q, prologue in itertools.product((1, 3), (None, turning(2, 1, 32))):
        c = call(2, 4, 2, q, 60, 32, 33, prologue=None if prologue is None else turning(2, q, 32))
        product = torch.cat([t.transpose(1, 2).flatten(2) for t in (c.query, c.key, c.value)], 2)
        query, key, value = (t.unflatten(2, (-1, 32)).transpose(1, 2) for t in product.split([128, 64, 64], 2))
        longer = torch.full((2, 2, 2, 99, 32), NAN).half()
        longer[0][:, :, :60], longer[1][:, :, :60] = c.keys, c.values
        want = run(c)
        with mock.patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("copied")) if prologue is None else mock.MagicMock():
            got = run(c._replace(query=query, key=key, value=value, keys=longer[0][:, :, :60], values=longer[1][:, :, :60]))
        interpreted.report(f"strided {q} {prologue is not None}", float(not torch.equal(got, want)), 0.0)
        interpreted.report(f"strided beyond {q} {prologue is not None}", float(not bool(longer[:, :, :, 60:].isnan().all())), 0.0)


def full():
    """No room: nothing is written, and the result is NaN, which samplers refuse."""
    for at in (-1, 40, 38, 10**6):
        for splits in (1, 3):
            c = call(1, 4, 2, 3, 40, 32, 30)._replace(position=torch.tensor(at))
            before = c.keys.clone(), c.values.clone()
            got = run(c, StepConfig(16, splits, 16))
            same = all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(before, (c.keys, c.values), strict=True))
            interpreted.report(f"full {at} {splits}", float(not (same and bool(got.isnan().all()))), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    positions()
    shapes()
    rings()
    options()
    prologues()
    early()
    strided()
    full()
