"""csrc/attention/step_attention.cu on a CPU: a decode step of fp4.cached_attention over a cache in the dtype of the query, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4_inductor import DispatchConfig
from fp4_inductor.kernels import params, select
from fp4_inductor.kernels.asked import NO_COUNTERS, NOT_CONTIGUOUS, OTHER_ROTATION, OTHER_SIZE, SEVERAL_QUERIES, WIDE_PROLOGUE
from fp4_inductor.kernels.cached_attention import cuda_step
from fp4_inductor.kernels.cached_attention.cuda import ALONE
from fp4_inductor.kernels.cached_attention.step import arguments
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.kernels.select import plan
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels.emulator import EmulatorError, check_caught, compiler, emulated
from lowering_tests.kernels.quantized_calls import NAN, distance, turning
from lowering_tests.kernels.quantized_calls import plain_call as call

F16, BF16 = torch.float16, torch.bfloat16
EARLY = ("position", "codes")  # read before the PDL wait of a call that is early
needs_emulator = pytest.mark.skipif(compiler() is None, reason="needs g++")


def fresh(c: CachedCall) -> CachedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone())


def run(c: CachedCall, tile: cuda_step.Tile = cuda_step.OWN, arch: int = 90, constants: tuple[str, ...] = ()) -> torch.Tensor:
    a = cuda_step._aligned(arguments(ALONE, c))
    kernel = emulated(cuda_step.LIBRARY.source, arch)
    return kernel.run(params.AttentionParams, cuda_step.fields(c, a, tile), a.out, changed=[c.keys, c.values], constants=constants)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def check(c: CachedCall, tile: cuda_step.Tile = cuda_step.OWN, **how) -> torch.Tensor:
    """Against float64: the result, and what was written. Twice: the same bits."""
    assert set(select.cached_form(c)) <= {NO_COUNTERS}
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    got = run(ours, tile, **how)
    assert distance(got, want) <= contract.CONTRACT.tolerance[c.query.dtype]
    for cache, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert same(cache, wanted) if c.prologue is None else distance(cache.nan_to_num(9.0), wanted.nan_to_num(9.0)) <= 5e-4
    assert same(run(again, tile, **how), got) and same(again.keys, ours.keys) and same(again.values, ours.values)
    return got


@needs_emulator
@pytest.mark.parametrize("tile", [(0, 0), (1, 3), (1, 4), (2, 3), (4, 4), pytest.param((16, 3), marks=pytest.mark.slow), (16, 4)], ids=str)
def test_positions(tile):
    """Empty, one token, the edges of tiles, more tiles than warps, warps and blocks without a tile, the last slot."""
    for at in (0, 1, 15, 16, 17, 31, 32, 95, 96, 130, 299):
        check(call(2, 4, 2, 1, 300, 64, at), tile)
    check(call(1, 4, 1, 1, 1300, 64, 1200, dtype=BF16), tile)


@needs_emulator
@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize(("d", "group"), [(64, 1), (64, 8), (64, 11), (128, 4), (128, 7), (128, 16)])
def test_shapes(arch, d, group):
    for dtype in (F16, BF16):
        check(call(2, 2 * group, 2, 1, 80, d, 70, dtype=dtype, scale=0.3), (2, 4 if dtype == F16 else 3), arch=arch)


@needs_emulator
def test_rings():
    """Before, at and after their first turn; of a length that tiles do not divide."""
    for at, (slots, window) in itertools.product((0, 8, 19, 20, 47, 150, 1000), ((20, 20), (24, 20), (37, 16), (160, 150))):
        check(call(2, 4, 2, 1, slots, 64, at, window), (2, 0))


@needs_emulator
def test_options():
    """Masked tokens change nothing, even the new one; sinks, soft-caps, rings of them."""
    for at in (0, 70):
        shape = (2, 4, 2, 1, 80, 64, at)
        check(call(*shape, sinks=True), (2, 0))
        check(call(*shape, softcap=1.5), (1, 0))
        check(call(*shape, 33, sinks=True, softcap=0.7), (2, 0))
        for first in (torch.tensor([0, 7]), torch.tensor([at, 20]), torch.tensor([0, 999])):
            check(call(*shape, mask=(torch.arange(80) >= first[:, None])[:, None, None]), (2, 0))
    check(call(2, 4, 2, 1, 80, 64, 60)._replace(arrivals=None))


@needs_emulator
def test_masked_tokens_may_be_nan():
    mask = torch.ones(1, 1, 1, 80, dtype=torch.bool)
    mask[..., 5:40] = False
    c = call(1, 4, 2, 1, 80, 64, 60, mask=mask)
    c.keys[:, :, 5:40] = c.values[:, :, 5:40] = NAN
    assert check(c, (2, 0)).isfinite().all()


@needs_emulator
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_norm_and_rotation(dtype):
    """Whole heads and a part of them, angles for a half or for all channels, one norm alone, many heads a KV head."""
    for d, (norm, rotary, half) in itertools.product((64, 128), ((True, None, False), (False, 64, True), (True, 0, False))):
        prologue = turning(2, 1, d, dtype, norm=norm, rotary=rotary or None, half=half, offset=1.0)
        if rotary == 0:
            prologue = prologue._replace(cos=None, sin=None, rotary=None)
        for group in (1, 7, 12):
            check(call(2, 2 * group, 2, 1, 80, d, 70, prologue=prologue, dtype=dtype), (2, 0))
    check(call(1, 4, 2, 1, 80, 64, 0, prologue=turning(1, 1, 64)._replace(q_norm=None)))


@needs_emulator
def test_rows_that_begin_anywhere_are_copied():
    wide = turning(1, 1, 64)
    odd = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (wide.q_norm, wide.cos)]
    check(call(1, 4, 2, 1, 80, 64, 30, prologue=wide._replace(q_norm=odd[0], cos=odd[1])))


@needs_emulator
def test_early():
    """Tiles requested before the PDL wait are those that are attended to; without `early` nothing is read before it."""
    for batch, at, window in (*itertools.product((1,), (0, 1, 70), (None, 33)), (3, 70, None)):
        c = call(batch, 4, 2, 1, 80, 64, at, window, prologue=turning(1, 1, 64), early=True)
        check(c, (2, 0), constants=(*EARLY, "q_norm", "k_norm"))
    c = call(1, 4, 2, 1, 80, 64, 70)
    check(c, (2, 0))
    with pytest.raises(EmulatorError, match="before the previous kernel has finished"):
        run(c._replace(early=True), (2, 0))


@needs_emulator
def test_no_room_writes_nothing_and_gives_nan():
    for at in (-1, 80, 1000):
        c = call(1, 4, 2, 1, 80, 64, 60)._replace(position=torch.tensor(at))
        ours = fresh(c)
        assert run(ours, (2, 0)).isnan().all() and same(ours.keys, c.keys) and same(ours.values, c.values)


@needs_emulator
def test_nan_stays_in_its_head_and_sequence():
    c = call(2, 4, 2, 1, 80, 64, 60)
    c.values[0, 1, 7] = NAN
    got = run(c, (2, 0))
    assert got[0, 0, 2:].isnan().all() and got[0, 0, :2].isfinite().all() and got[1].isfinite().all()


@needs_emulator
def test_a_kernel_that_keeps_an_old_peak_is_caught():
    c = call(1, 4, 2, 1, 300, 64, 290)
    want = contract.CONTRACT.reference(*fresh(c).flat())
    check_caught(emulated(cuda_step.LIBRARY.source), "OLD_PEAK_KEPT", None, lambda: distance(run(fresh(c), (1, 4)), want), 0.02)


def test_which_calls_it_serves():
    """Where nothing is asked for that it does not take."""
    other = "triton_cached_attention"

    def kernel(*form, arch=90, d=128, **config):
        return plan(Call("cached_attention", arch, BF16, 32, d, form=form), DispatchConfig(**config)).pick(4).kernel

    for arch, expected in ((80, other), (90, cuda_step.NAME), (100, cuda_step.NAME), (120, cuda_step.NAME)):
        assert kernel(arch=arch) == expected and kernel(OTHER_SIZE, arch=arch) == other
    assert kernel(thresholds={"step_attention": 0}) == other
    for more in (SEVERAL_QUERIES, OTHER_ROTATION, NOT_CONTIGUOUS, WIDE_PROLOGUE):
        assert kernel(more) == other
    assert kernel(d=80) == other
    assert kernel(NO_COUNTERS) == cuda_step.NAME, "which has none"


def test_what_is_said_of_calls():
    c = call(1, 4, 2, 1, 80, 64, 30)
    assert not select.cached_form(c)
    long = torch.empty(1, 2, 16384, 64, dtype=F16, device="meta")
    assert select.cached_form(call(1, 4, 2, 1, 8, 64, 0)._replace(keys=long, values=long)) == (OTHER_SIZE,)
    assert select.cached_form(call(1, 4, 2, 2, 80, 64, 30)) == (SEVERAL_QUERIES,)
    assert select.cached_form(c._replace(prologue=turning(1, 1, 64, rotary=32))) == (OTHER_ROTATION,)
    assert select.cached_form(c._replace(prologue=turning(1, 1, 64, torch.float32))) == (WIDE_PROLOGUE,)
    assert select.cached_form(c._replace(keys=c.keys.transpose(1, 2).contiguous().transpose(1, 2))) == (NOT_CONTIGUOUS,)
