"""csrc/attention on a CPU: fp4.cached_attention over a cache in 8 or 4 bits against float64, and what it writes against formats/kv.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4_inductor.formats import kv
from fp4_inductor.kernels import params, select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS, cache_in
from fp4_inductor.kernels.cached_attention import cuda
from fp4_inductor.kernels.cached_attention.step import arguments
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels.emulator import EmulatorError, check_caught, compiler, emulated
from lowering_tests.kernels.quantized_calls import NAN, call, distance, fresh, numbers, turning

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++")
FORMATS = tuple(kv.FORMATS)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SOURCE = "attention/cached_attention.cu"
# Read before the PDL wait of a call that is early: what no kernel of this step writes.
EARLY = ("position",)


def run(c: CachedCall, parts: int = 0, arch: int = 90, constants: tuple[str, ...] = ()) -> torch.Tensor:
    a = arguments(cuda.ALONE, c)
    changed = [t for t in (c.keys, c.values, *c.stored, c.arrivals) if t is not None]
    return emulated(SOURCE, arch).run(params.AttentionParams, cuda.fields(c, a, parts), a.out, changed=changed, constants=constants)


def check(c: CachedCall, parts: int = 0, written: float = 1e-6, bound: float = 1.0, **how) -> torch.Tensor:
    """Against float64: the result, what was written, and that the counters are zero again. Twice: the same bits."""
    assert set(select.cached_form(c)).difference(NOT_BY_CLUSTERS) == {cache_in(c.format.name)}
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    got = run(ours, parts, **how)
    assert distance(got, want) <= bound * contract.CONTRACT.tolerance[c.query.dtype]
    assert max(distance(a, b) for a, b in zip(numbers(ours), numbers(theirs), strict=True)) <= written
    assert not ours.arrivals.any(), "counters are zero again"
    assert torch.equal(run(again, parts, **how).nan_to_num(9.0), got.nan_to_num(9.0)) and all(map(torch.equal, numbers(again), numbers(ours)))
    return got


@pytest.mark.parametrize("name", FORMATS)
def test_positions(name):
    """Empty, one token, the edges of tiles, of parts and of the exact tokens, full to the last slot; parts without a position."""
    for at, parts in itertools.product((0, 1, 3, 4, 15, 16, 17, 63, 67, 68, 69, 127, 128, 129, 196, 299), (1, 3)):
        check(call(name, 1, 4, 2, 1, 300, 64, at), parts)
    for at in (0, 5, 66, 142, 292):
        check(call(name, 2, 4, 2, 8, 300, 64, at), 3)
    check(call(name, 1, 4, 2, 1, 2600, 64, 2500), 19)
    check(call(name, 1, 4, 2, 1, 2600, 64, 2500))


@pytest.mark.parametrize("arch", [80, 90, pytest.param(120, marks=pytest.mark.slow)])  # sm_120 takes the branches of sm_90
@pytest.mark.parametrize("name", FORMATS)
def test_shapes(name, arch):
    for d, group in itertools.product(cuda.WIDTHS, (1, 4, 7, 16)):
        check(call(name, 1, 2 * group, 2, 1, 200, d, 150), 2, arch=arch)
    for d, q, dtype in itertools.product(cuda.WIDTHS, (2, 3, 8), (F16, BF16)):
        check(call(name, 1, 4, 2, q, 200, d, 141, dtype=dtype, scale=0.3), 2, arch=arch)


@pytest.mark.parametrize("name", FORMATS)
def test_rings(name):
    """Before, at and after their first turn, with as many new tokens as they keep."""
    for at, (slots, window, q) in itertools.product((0, 8, 20, 47, 150, 1000), ((20, 20, 1), (24, 20, 5), (160, 150, 4), (300, 290, 1))):
        check(call(name, 1, 4, 2, q, slots, 64, at, window), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_options(name):
    for at, q in itertools.product((0, 170), (1, 3)):
        shape = (name, 2, 4, 2, q, 200, 64, at)
        check(call(*shape, sinks=True), 2)
        check(call(*shape, softcap=1.5), 2)
        check(call(*shape, window=177, sinks=True, softcap=0.7), 2)
        for first in (torch.tensor([0, 7]), torch.tensor([at, 20]), torch.tensor([0, 999])):
            check(call(*shape, mask=(torch.arange(200) >= first[:, None])[:, None, None]), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_norm_and_rotation(name):
    for at, d, (norm, rotary, half), dtype in itertools.product((0, 70), (64, 128), ((True, None, False), (False, 32, True), (True, 0, False)), (F16, F32)):
        prologue = turning(2, 3, d, dtype, norm=norm, rotary=rotary or None, half=half, offset=1.0)
        if rotary == 0:
            prologue = prologue._replace(cos=None, sin=None, rotary=None)
        # Rounded once more often than in the reference; one of them may put a number on the other side of a tie.
        check(call(name, 2, 4, 2, 3, 100, d, at, prologue=prologue), 2, written=1e-2, bound=2.0)
    check(call(name, 1, 4, 2, 1, 100, 64, 80, prologue=turning(1, 1, 64)._replace(q_norm=None)), written=1e-2, bound=2.0)


@pytest.mark.parametrize("name", FORMATS)
def test_early(name):
    """Tiles requested before the PDL wait are the tiles that are attended to."""
    for at, window, q in itertools.product((0, 1, 80), (None, 75), (1, 3)):
        check(call(name, 1, 4, 2, q, 100, 64, at, window, sinks=True, early=True), 2, constants=(*EARLY, "codes", "scale", "blocks"))


@pytest.mark.parametrize("name", FORMATS)
def test_not_early_waits_first(name):
    c = call(name, 1, 4, 2, 1, 100, 64, 80)
    check(c, 2)
    with pytest.raises(EmulatorError, match="before the previous kernel has finished"):
        run(c._replace(early=True), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_unusual_numbers(name):
    """Rows of zeros, tiny and huge numbers, NaN and Inf in one head of one token, keys with a large mean."""
    c = call(name, 1, 4, 2, 2, 100, 64, 80)
    c.key[:, :, 0], c.value[:, :, 0] = 0.0, 0.0
    check(c, 2)
    for factor in (1e-6, 3e3):
        check(c._replace(value=(c.value.float() * factor).half()), 2, written=1e-3)
    c = call(name, 1, 4, 2, 2, 100, 64, 0)
    check(c._replace(key=(c.key.float() + 60.0 * (torch.arange(64) % 16 == 3)).half()), 2, written=1e-2)
    for number, which in itertools.product((NAN, float("inf")), ("query", "key", "value")):
        c = call(name, 1, 4, 2, 2, 100, 64, 80)
        getattr(c, which)[0, 1, 1, 3] = number
        finite = run(fresh(c), 2).isfinite().all(-1)[0]  # [Q, H]: heads 2 and 3 belong to the second KV head
        if which == "query":
            assert not finite[1, 1] and finite.sum() == 7
        else:
            assert finite[:, :2].all() and (c.format.exact or not finite[1, 2:].any())  # an exact key of Inf may have a score of -Inf


@pytest.mark.parametrize("name", FORMATS)
def test_no_room(name):
    """Nothing is written, and the result is NaN, which samplers refuse."""
    for at, parts in itertools.product((-1, 100, 98), (1, 3)):
        c = call(name, 1, 4, 2, 3, 100, 64, 80)._replace(position=torch.tensor(at))
        before = fresh(c)
        assert run(c, parts).isnan().all() and all(map(torch.equal, numbers(before), numbers(c)))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("TRIGGER_BEFORE_PDL_WAIT", "before this one has waited"), ("STORE_BEFORE_PDL_WAIT", "before the previous kernel has finished"),
        ("RESULTS_OVER_THE_QUERY", "race"), ("FRAGMENTS_BEFORE_THE_QUERY", "race"), ("OLD_PEAK_KEPT", None),
    ],
)  # fmt: skip
def test_a_fault_is_seen(fault, words):
    c = call("k8v4", 1, 4, 2, 1, 300, 64, 290)
    want = contract.CONTRACT.reference(*fresh(c).flat())
    check_caught(emulated(SOURCE, 90), fault, words, lambda: distance(run(fresh(c), 2), want), least=1e-3)


def test_a_counter_that_is_not_set_back_is_seen():
    c = call("k8v4", 1, 4, 2, 1, 300, 64, 290)
    with emulated(SOURCE, 90).fault("COUNTER_NOT_SET_BACK"), pytest.raises(AssertionError, match="zero again"):
        check(c, 2)


def test_what_it_does_not_take():
    c = call("k8v4", 1, 4, 2, 1, 100, 64, 80)
    a = arguments(cuda.ALONE, c)
    for wrong in (dict(D=80), dict(heads=5), dict(queries=9), dict(format=3), dict(slots=0), dict(tile=(65,)), dict(rotary=3, angles=3)):
        with pytest.raises(EmulatorError, match="status 1"):
            emulated(SOURCE, 90).run(params.AttentionParams, cuda.fields(c, a, 1) | wrong, a.out)
    with pytest.raises(EmulatorError, match="status 1"):  # scratch memory is too small
        emulated(SOURCE, 90).run(params.AttentionParams, cuda.fields(c, a, 3), a.out, scratch=64)
