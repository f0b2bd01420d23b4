"""fp4.cached_attention in one launch, without a GPU: numerics in Triton's interpreter, machine code, which calls it serves, the launcher's arguments."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels import host, select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS
from fp4_inductor.kernels.cached_attention import composed, step, triton_step
from fp4_inductor.kernels.cached_attention.step import StepConfig
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.ops.cached_call import CachedCall, Prologue
from lowering_tests.kernels import attention_aot
from lowering_tests.kernels.test_aot import assert_fits, global_atomics
from lowering_tests.own_process import cases_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("every", "counts"), [
    ("", {**dict.fromkeys(("step", "written", "counters", "again"), 107), "late": 10, "strided": 8, "full": 8}),
    pytest.param("1", {**dict.fromkeys(("step", "written", "counters", "again"), 263), "late": 48, "strided": 8, "full": 8}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_in_the_interpreter(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_step.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


# --- machine code -----------------------------------------------------------------------------------------------

# (architecture, what of the call): all of it where it was made for, elsewhere what takes most registers. With --slow what has fewer parts than another, too.
COMPILED = [
    (90, dict(prologue="norm rope")), (90, dict(prologue="norm rope", early=True)), (90, dict(prologue="rope", window=128, others=True)),
    (90, dict(prologue="norm rope", batch=32)), (90, dict(d=64, group=8, dtype="fp16")),
    (80, dict(d=256, prologue="norm rope", masked=True)), (120, dict(d=256, prologue="norm rope", others=True, masked=True)),
    *[pytest.param(cc, call, marks=pytest.mark.slow) for cc, call in (
        (90, {}), (90, dict(prologue="norm rope", queries=4)), (90, dict(d=256, kv_heads=4, group=2, prologue="norm rope")),
        (90, dict(d=96, group=1, prologue="rope", masked=True)), (80, dict(prologue="norm rope")), (120, dict(prologue="norm rope")),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("cc", "call"), COMPILED, ids=lambda x: str(x).replace(" ", ""))
def test_a_decode_step(cc, call):
    """K and V are copied 16 bytes at a time while others are computed with; one program in each part counts itself, in order; two programs fit."""
    done, t = attention_aot.step(cc, **call)
    assert_fits(done, t.num_warps, cc, blocks=2)
    opcodes = done.opcodes()
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in opcodes)
    assert sum(n for op, n in opcodes.items() if op.startswith("LDG.E.U16")) <= 10, "of tokens and angles nothing is loaded element by element"
    assert done.count("HMMA") > 0
    atomics = global_atomics(done)
    assert len(atomics) == (t.splits > 1), atomics
    if t.splits > 1:
        assert "atom.global.gpu.acq_rel.add" in done.ptx
        assert "ld.global.cg" in done.ptx


def test_early_requests_before_the_wait():
    """Of the first tile; without EARLY nothing of the cache is read before it."""
    for early in (True, False):
        done, _ = attention_aot.step(90, prologue="norm rope", early=early)
        before = done.sass[: done.sass.index("ACQBULK")]
        assert ("LDG.E.128" in before) == early


# --- selection --------------------------------------------------------------------------------------------------


NO_PREFILL = DispatchConfig(thresholds={"step_attention": 0, "prefill_attention": 0})  # test_prompts.py has what it serves


@pytest.mark.parametrize("arch", [0, 80, 89, 90, 100, 120, 121])
def test_which_calls_it_serves(arch):
    def kernel(m, d=128, dtype=BF16, config=None, form=()):
        return plan(Call("cached_attention", arch, dtype, 32, d, form=form), config or NO_PREFILL).pick(m).kernel

    ours, apart = "triton_cached_attention" if arch else "append + attention", "append + attention"
    for d in (8, 64, 80, 128, 256):
        assert [kernel(m, d) for m in (1, 16, 17, 4096)] == [ours] * 2 + [apart] * 2
    assert kernel(4, dtype=FP16) == ours
    off = DispatchConfig(thresholds={"step_attention": 0, "attention": 0})
    assert {kernel(4, dtype=FP32), kernel(4, 36), kernel(4, form=("x",)), kernel(4, config=off)} == {apart}


def a_call(q=1, d=64, slots=40, arrivals=True, **options) -> CachedCall:
    query, key, value = torch.randn(2, 8, q, d).to(BF16), *torch.randn(2, 2, 2, q, d).to(BF16)
    keys, values = torch.zeros(2, 2, 2, slots, d, dtype=BF16)
    counters = torch.zeros(4, dtype=torch.int32) if arrivals else None
    return CachedCall(query, key, value, keys, values, torch.tensor(7), arrivals=counters)._replace(**options)


REFUSED = {
    "no counters of arrival": dict(arrivals=False),
    "a cache that is known to be empty": dict(empty=True),
    "values of another width, 32": dict(value=torch.zeros(2, 2, 1, 32, dtype=BF16)),
    "a mask that adds numbers": dict(mask=torch.zeros(1, 1, 1, 40)),
    "a mask for each query or head": dict(mask=torch.ones(1, 8, 1, 40, dtype=torch.bool)),
    "attention that is not causal": dict(causal=False, mask=torch.ones(1, 1, 1, 40, dtype=torch.bool)),
    "more new tokens than the ring keeps besides its window": dict(window=40, q=2),
    "a cache whose channels are apart": dict(keys=torch.zeros(2, 2, 64, 40, dtype=BF16).mT),
    "heads of width 264, more than 256": dict(d=264),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_why_a_call_is_not_served(reason):
    assert tuple(asked for asked in select.cached_form(a_call(**REFUSED[reason])) if asked not in NOT_BY_CLUSTERS) == (reason,)


def test_what_it_serves_besides_plain_calls():
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    for options in ({}, dict(q=4), dict(window=8), dict(window=37, q=4), dict(mask=mask), dict(mask=mask[:1]), dict(softcap=2.0), dict(sinks=torch.zeros(8))):
        assert set(select.cached_form(a_call(**options))) <= set(NOT_BY_CLUSTERS), options


def test_the_operator_takes_the_kernel_of_the_plan(monkeypatch):
    """On a GPU, with the call as it came: its prologue is the kernel's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(host, "row_for", lambda op, x, m, n, k, form=(): plan(Call(op, 90, x.dtype, n, k, form=form), NO_PREFILL).pick(m))
    called = []
    monkeypatch.setattr(step, "step", lambda c: called.append(("one", c)))
    monkeypatch.setattr(composed, "apart", lambda c: called.append(("apart", c)))
    monkeypatch.setattr("fp4_inductor.kernels.forms.source", lambda name: {"step": step.step, "apart": composed.apart}[name.partition(":")[2]])
    calls = [a_call(prologue=Prologue(torch.ones(64))), a_call(q=5), a_call(arrivals=False)]
    for c in calls:
        composed.cached_attention(c)
    assert [name for name, _ in called] == ["one", "apart", "apart"]
    assert all(got is given for (_, got), given in zip(called, calls, strict=True))


# --- the launcher -----------------------------------------------------------------------------------------------


def launched(c, tile=None, arch=90, run=step.step, kernel=(triton_step, "cached_attention_step")):
    """``(grid, arguments by name)`` of the one kernel that ``run`` would launch; ``kernel``: its module and its name."""
    names = getattr(*kernel).arg_names
    with (
        mock.patch.multiple(host, arch=mock.Mock(return_value=arch), processors=mock.Mock(return_value=132)),
        mock.patch.object(*kernel, mock.MagicMock()) as launch,
    ):
        run(c, tile)
    ((grid,),) = (call.args for call in launch.__getitem__.call_args_list)
    ((args, options),) = (call[1:] for call in launch.__getitem__.return_value.mock_calls)
    given = dict(zip(names, args, strict=False)) | options
    assert set(given) - {"num_warps", "num_stages", "launch_pdl"} == set(names)
    return grid, given


def test_arguments_are_passed_as_they_lie():
    product = torch.randn(2, 1, 12 * 64).to(BF16)
    query, key, value = (part.view(2, 1, -1, 64).transpose(1, 2) for part in product.split([512, 128, 128], 2))
    longer = torch.zeros(2, 2, 2, 99, 64, dtype=BF16)
    c = a_call()._replace(query=query, key=key, value=value, keys=longer[0][:, :, :40], values=longer[1][:, :, :40])
    grid, given = launched(c, StepConfig(64, 3))
    assert grid == (2 * 2 * 3,)
    for name, tensor in dict(Q=query, KEY=key, VALUE=value, K=c.keys, V=c.values, POSITION=c.position, ARRIVALS=c.arrivals).items():
        assert given[name].data_ptr() == tensor.data_ptr(), name
    assert [given[f"stride_q{x}"] for x in "bhq"] == list(query.stride()[:3])
    assert [given[f"stride_k{x}"] for x in "bhs"] == [2 * 99 * 64, 99 * 64, 64]
    assert (given["SLOTS"], given["HEADS"], given["QUERIES"], given["SPLITS"], given["GROUP"]) == (40, 8, 1, 3, 4)
    assert [given[n].numel() for n in ("PARTIAL", "PEAK", "SUM")] == [2 * 8 * 3 * 64, 2 * 8 * 3, 2 * 8 * 3]
    assert given["PDL"] and given["launch_pdl"] and not launched(c, arch=89)[1]["PDL"]
    assert given["MASK"] is given["Q_NORM"] is given["COS"] is given["SINKS"] is None and not given["EARLY"]


def test_one_part_needs_no_memory():
    _, given = launched(a_call(), StepConfig(64, 1))
    assert given["WHOLE"] and given["PEAK"] is given["SUM"] is given["PARTIAL"] is given["ARRIVALS"] is None


def test_masks_and_angles_of_one_sequence_are_not_repeated():
    mask, angles = torch.ones(1, 1, 1, 40, dtype=torch.bool), torch.ones(1, 1, 32)
    _, given = launched(a_call(mask=mask, early=True, prologue=Prologue(None, torch.ones(64), 1e-5, 1.0, angles, angles, 64)))
    assert (given["stride_mb"], given["stride_mp"], given["LENGTH"], given["stride_cb"]) == (0, 1, 40, 0)
    assert (given["ROTARY"], given["ANGLES"], given["NORM_Q"], given["NORM_K"], given["eps"], given["offset"]) == (64, 32, False, True, 1e-5, 1.0)
    assert not given["EARLY"], "the kernel before may have made the mask"
    assert launched(a_call(early=True))[1]["EARLY"]


@pytest.mark.parametrize("processors", [46, 132, 148])
@pytest.mark.parametrize("length", [1, 520, 131072])
@pytest.mark.parametrize("heads", [1, 8, 256])
def test_parts_fill_the_gpu(heads, length, processors):
    t = step.config(1, heads, length, 128, processors, 90)
    assert 1 <= t.splits <= max(1, -(-length // t.block_s))
    assert heads * t.splits >= 1.3 * processors or t.splits in (16, -(-length // t.block_s))
