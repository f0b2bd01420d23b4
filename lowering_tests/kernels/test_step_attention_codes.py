"""csrc/attention/step_attention_codes.cu on a CPU, over caches in fp8 and k8v4: against float64, and what it writes against formats/kv.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4_inductor import DispatchConfig
from fp4_inductor.kernels import params, select
from fp4_inductor.kernels.asked import NO_COUNTERS, ODD_SLOTS, OTHER_ROTATION, OTHER_SIZE, SEVERAL_QUERIES, WIDE_PROLOGUE, cache_in, suits_clusters
from fp4_inductor.kernels.cached_attention import cuda_step
from fp4_inductor.kernels.cached_attention.cuda import ALONE
from fp4_inductor.kernels.cached_attention.step import arguments
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.kernels.select import plan
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels.emulator import EmulatorError, compiler, emulated
from lowering_tests.kernels.quantized_calls import NAN, call, distance, fresh, numbers, turning

FORMATS = cuda_step.FORMATS
F16, BF16 = torch.float16, torch.bfloat16
EARLY = ("position", "codes", "scale", "blocks")  # read before the PDL wait of a call that is early
needs_emulator = pytest.mark.skipif(compiler() is None, reason="needs g++")


def run(c: CachedCall, tile: cuda_step.Tile = cuda_step.OWN, arch: int = 90, constants: tuple[str, ...] = ()) -> torch.Tensor:
    a = cuda_step._aligned(arguments(ALONE, c))
    changed = [t for t in (c.keys, c.values, *c.stored) if t is not None]
    kernel = emulated(cuda_step.LIBRARY_OF_CODES.source, arch)
    return kernel.run(params.AttentionParams, cuda_step.fields(c, a, tile), a.out, changed=changed, constants=constants)


def check(c: CachedCall, tile: cuda_step.Tile = cuda_step.OWN, written: float = 1e-6, bound: float = 1.0, **how) -> torch.Tensor:
    """Against float64: the result, and what was written. Twice: the same bits."""
    assert set(select.cached_form(c)) <= {cache_in(c.format.name), NO_COUNTERS}
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    got = run(ours, tile, **how)
    assert distance(got, want) <= bound * contract.CONTRACT.tolerance[c.query.dtype]
    assert max(distance(a, b) for a, b in zip(numbers(ours), numbers(theirs), strict=True)) <= written
    assert torch.equal(run(again, tile, **how).nan_to_num(9.0), got.nan_to_num(9.0)) and all(map(torch.equal, numbers(again), numbers(ours)))
    return got


@needs_emulator
@pytest.mark.parametrize(("name", "tile"), [
    *itertools.product(FORMATS, [(0, 0), (1, 7), (2, 3)]), ("k8v4", (16, 3)), ("fp8", (16, 7)),
    *[pytest.param(name, tile, marks=pytest.mark.slow) for name, tile in (("fp8", (16, 3)), ("k8v4", (16, 7)))],
], ids=str)  # fmt: skip
def test_positions(name, tile):
    """Empty, one token, the edges of tiles, more tiles than warps, warps and blocks without a tile, the last slot; slots that end within a tile."""
    for at in (0, 1, 15, 16, 17, 31, 32, 95, 130, 303):
        check(call(name, 2, 4, 2, 1, 304, 64, at), tile)
    check(call(name, 1, 4, 1, 1, 1304, 64, 1303, dtype=BF16), tile)


@needs_emulator
@pytest.mark.parametrize("arch", [90, pytest.param(120, marks=pytest.mark.slow)])  # sm_120 takes the branches of sm_90 in less shared memory
@pytest.mark.parametrize("name", FORMATS)
def test_shapes(name, arch):
    for d, group, dtype in itertools.product(cuda_step.WIDTHS, (1, 4, 8, 11, 16), (F16, BF16)):
        check(call(name, 2, 2 * group, 2, 1, 80, d, 70, dtype=dtype, scale=0.3), (2, 7 if dtype == F16 else 3), arch=arch)


@needs_emulator
@pytest.mark.parametrize("name", FORMATS)
def test_rings(name):
    """Before, at and after their first turn; of a length that tiles do not divide."""
    for at, (slots, window) in itertools.product((0, 8, 23, 24, 47, 150, 1000), ((24, 20), (40, 16), (160, 150), (304, 290))):
        check(call(name, 2, 4, 2, 1, slots, 64, at, window), (2, 0))


@needs_emulator
@pytest.mark.parametrize("name", FORMATS)
def test_options(name):
    """Masked tokens change nothing, even the new one; what is compared with scores needs the mean of keys in them."""
    for at in (0, 70):
        shape = (name, 2, 4, 2, 1, 80, 64, at)
        check(call(*shape, sinks=True), (2, 0))
        check(call(*shape, softcap=1.5), (1, 0))
        check(call(*shape, window=33, sinks=True, softcap=0.7), (2, 0))
        for first in (torch.tensor([0, 7]), torch.tensor([at, 20]), torch.tensor([0, 999])):
            check(call(*shape, mask=(torch.arange(80) >= first[:, None])[:, None, None]), (2, 0))
    check(call(*shape)._replace(arrivals=None))


@needs_emulator
@pytest.mark.parametrize(("name", "dtype"), [
    ("fp8", F16), ("k8v4", BF16), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fp8", BF16), ("k8v4", F16))),
])  # fmt: skip
def test_norm_and_rotation(name, dtype):
    """Whole heads and a part of them, angles for a half or for all channels, one norm alone."""
    for at, d, (norm, rotary, half) in itertools.product((0, 70), (64, 128), ((True, None, False), (False, 64, True), (True, 0, False))):
        prologue = turning(2, 1, d, dtype, norm=norm, rotary=rotary or None, half=half, offset=1.0)
        if rotary == 0:
            prologue = prologue._replace(cos=None, sin=None, rotary=None)
        for group in (2, 12):
            # Rounded once more often than in the reference; one of them may put a number on the other side of a tie.
            check(call(name, 2, 2 * group, 2, 1, 80, d, at, dtype=dtype, prologue=prologue), (2, 0), written=1e-2, bound=2.0)
    check(call(name, 1, 4, 2, 1, 80, 64, 30, prologue=turning(1, 1, 64)._replace(q_norm=None)), written=1e-2, bound=2.0)


@needs_emulator
@pytest.mark.parametrize("name", FORMATS)
def test_early(name):
    """Tiles requested before the PDL wait are those that are attended to; without `early` nothing is read before it."""
    for at, window in itertools.product((0, 1, 70), (None, 33)):
        check(call(name, 1, 4, 2, 1, 80, 64, at, window, sinks=True, early=True), (2, 0), constants=(*EARLY, "q_norm", "k_norm"))
    c = call(name, 1, 4, 2, 1, 80, 64, 70)
    check(c, (2, 0))
    with pytest.raises(EmulatorError, match="before the previous kernel has finished"):
        run(c._replace(early=True), (2, 0))


@needs_emulator
@pytest.mark.parametrize("name", FORMATS)
def test_no_room_writes_nothing_and_gives_nan(name):
    for at in (-1, 80, 1000):
        c = call(name, 1, 4, 2, 1, 80, 64, 60)._replace(position=torch.tensor(at))
        ours = fresh(c)
        assert run(ours, (2, 0)).isnan().all() and all(map(torch.equal, numbers(ours), numbers(c)))


@needs_emulator
@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_head_and_sequence(name):
    c = call(name, 2, 4, 2, 1, 80, 64, 60)
    c.stored.value_scale[0, 1, 7] = NAN
    got = run(fresh(c), (2, 0))
    assert got[0, 0, 2:].isnan().all() and got[0, 0, :2].isfinite().all() and got[1].isfinite().all()
    c.key[1, 0] = NAN
    got = run(fresh(c), (2, 0))
    assert got[1, 0, :2].isnan().all() and got[1, 0, 2:].isfinite().all()


def test_what_is_said_of_calls():
    c = call("k8v4", 1, 4, 2, 1, 80, 64, 30)
    of = cache_in("k8v4")
    assert select.cached_form(c) == (of,)
    assert set(select.cached_form(call("k8v4", 1, 4, 2, 2, 80, 64, 30))) == {of, SEVERAL_QUERIES}
    assert set(select.cached_form(c._replace(prologue=turning(1, 1, 64, rotary=32)))) == {of, OTHER_ROTATION}
    assert set(select.cached_form(c._replace(prologue=turning(1, 1, 64, BF16)))) == {of, WIDE_PROLOGUE}
    assert set(select.cached_form(call("k8v4", 1, 4, 2, 1, 84, 64, 30))) == {of, ODD_SLOTS}


@pytest.mark.parametrize("name", FORMATS)
def test_which_calls_it_serves(name):
    """Where nothing is asked for that it does not take."""
    of, other = cache_in(name), "cuda_quantized_attention"

    def kernel(*form, arch=90, d=128, **config):
        return plan(Call("cached_attention", arch, BF16, 32, d, form=form), DispatchConfig(**config)).pick(4).kernel

    for arch, expected in ((80, other), (90, cuda_step.NAME_OF_CODES), (100, cuda_step.NAME_OF_CODES), (120, cuda_step.NAME_OF_CODES)):
        assert kernel(of, arch=arch) == expected and kernel(of, OTHER_SIZE, arch=arch) == other
    for more in (SEVERAL_QUERIES, OTHER_ROTATION, ODD_SLOTS, WIDE_PROLOGUE):
        assert kernel(of, more) == other
    assert {kernel(of, d=256), kernel(cache_in("nvfp4")), kernel(of, thresholds={"step_attention": 0})} == {other}
    assert kernel(of, NO_COUNTERS) == cuda_step.NAME_OF_CODES, "which has none"


def test_which_sizes_suit_it():
    for format in ("", "fp8", "k8v4"):
        assert suits_clusters(8, 768, format) and suits_clusters(8, 8448, format)
        assert not suits_clusters(8, 16384, format) and not suits_clusters(16, 8192, format)
        assert suits_clusters(64, 4608, format) and suits_clusters(32, 8192, format) and suits_clusters(132, 32768, format)
        assert suits_clusters(256, 8192, format) and not suits_clusters(256, 1024, "k8v4")
    assert suits_clusters(264, 768, "") and not suits_clusters(265, 768, "")
    assert not suits_clusters(133, 768, "fp8") and suits_clusters(256, 4096, "fp8") and not suits_clusters(256, 4096, "k8v4")
