"""fp4.cached_attention in one launch over a cache in 8 or 4 bits, without a GPU: numerics in Triton's interpreter, machine code, which calls it serves."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.config import DispatchConfig
from fp4_inductor.formats import kv
from fp4_inductor.kernels import select
from fp4_inductor.kernels.cached_attention import quantized, triton_quantized
from fp4_inductor.kernels.cached_attention.cuda import WIDTHS
from fp4_inductor.kernels.cached_attention.step import StepConfig
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.ops.cached_call import CachedCall, Stored
from lowering_tests.kernels import attention_aot
from lowering_tests.kernels import test_attention_step as one_launch
from lowering_tests.kernels.test_aot import assert_fits, global_atomics
from lowering_tests.own_process import cases_of

BF16 = torch.bfloat16
FORMATS = tuple(kv.FORMATS)
TRITON, CUDA = "triton_quantized_attention", "cuda_quantized_attention"
WITHOUT_CUDA = DispatchConfig(thresholds={"step_attention": 0, "cuda_attention": 0})
NO_PREFILL = DispatchConfig(thresholds={"step_attention": 0, "prefill_attention": 0})  # test_prompts.py has what it serves


@pytest.mark.parametrize(("every", "counts"), [
    ("", {**dict.fromkeys(("quantized", "written", "counters", "again"), 97), "unusual": 12, "full": 4}),
    pytest.param("1", {**dict.fromkeys(("quantized", "written", "counters", "again"), 294), "unusual": 12, "full": 18}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_in_the_interpreter(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_quantized.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


# --- machine code -----------------------------------------------------------------------------------------------

# Forms of a call are tried for nvfp4, whose kernel has the most parts: codes, block scales and exact tokens. --slow tries them for every format.
FORMS = (dict(prologue="norm rope", early=True), dict(prologue="norm rope", queries=4))
COMPILED = [
    *[(90, name, dict(prologue="norm rope")) for name in ("fp8", "k8v4")], (90, "nvfp4", FORMS[0]),
    (90, "nvfp4", dict(prologue="rope", window=128, others=True, masked=True)),
    (80, "nvfp4", dict(prologue="norm rope", others=True, masked=True)), pytest.param(120, "nvfp4", dict(prologue="norm rope"), marks=pytest.mark.slow),
    *[pytest.param(90, "nvfp4", form, marks=pytest.mark.slow) for form in (dict(prologue="norm rope"), FORMS[1])],
    pytest.param(90, "k8v4", dict(d=64, group=8, dtype="fp16"), marks=pytest.mark.slow), pytest.param(80, "fp8", {}, marks=pytest.mark.slow),
    *[pytest.param(90, name, form, marks=pytest.mark.slow) for name in ("fp8", "k8v4") for form in FORMS],
    *[pytest.param(cc, "k8v4", dict(prologue="norm rope"), marks=pytest.mark.slow) for cc in (80, 120)],
]  # fmt: skip


@pytest.mark.parametrize(("cc", "name", "call"), COMPILED, ids=lambda x: str(x).replace(" ", ""))
def test_a_decode_step(cc, name, call):
    """Codes are copied 16 bytes at a time while others are computed with; numbers are made two at a time; two programs fit."""
    done, t = attention_aot.quantized(cc, name, **call)
    assert_fits(done, t.num_warps, cc, blocks=2)
    opcodes = done.opcodes()
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in opcodes)
    assert "masked" in call or not any(op.startswith("LDG.E.U8") for op in opcodes), "only a mask is loaded byte by byte"
    assert done.count("HMMA") > 0
    assert name == "fp8" or done.count("HMUL2" if name == "nvfp4" else "HADD2") > 0
    assert len(global_atomics(done)) == 1
    if call.get("queries", 1) == 1 and not call.get("early"):
        assert sum(opcodes.values()) < 6000, "a new token is rounded in one row, not in sixteen"


@pytest.mark.parametrize("name", ["nvfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "k8v4"))])
@pytest.mark.parametrize("early", [pytest.param(False, marks=pytest.mark.slow), True])  # early: more is in registers at once
def test_wide_heads_fit(name, early):
    done, _ = attention_aot.quantized(90, name, d=256, kv_heads=4, group=2, prologue="norm rope", early=early)
    assert done.spills == 0 and done.shared <= 99 * 1024, "on sm_86, 89 and 120 too"


# --- selection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [0, 80, 90, 120])
def test_which_calls_it_serves(arch):
    def kernel(m, config=None, dtype=BF16, form=("a cache in k8v4",), d=128, csrc=""):
        return plan(Call("cached_attention", arch, dtype, 32, d, form=form, csrc=csrc), config or NO_PREFILL).pick(m).kernel

    apart = "append + attention"
    cuda, triton = (CUDA, TRITON) if arch else (apart, apart)
    assert [kernel(m) for m in (1, 16, 17)] == [cuda, cuda, apart]
    assert {kernel(4, form=(f"a cache in {name}",), d=d) for name in FORMATS for d in WIDTHS} == {cuda}
    assert {kernel(4, d=80), kernel(4, csrc="no nvcc"), kernel(4, config=WITHOUT_CUDA)} == {triton}
    off = [dict(dtype=torch.float32), dict(d=40), dict(form=("a cache in k8v4", "no counters of arrival"))]
    off += [dict(config=DispatchConfig(thresholds={"step_attention": 0, "cuda_attention": 0, "attention": 0}))]
    assert {kernel(4, **case) for case in off} == {apart}
    assert kernel(4, form=()) == ("triton_cached_attention" if arch else apart), "a cache in the dtype of the query has a kernel of its own"


def test_why_others_do_not_serve_a_call():
    of_cache = Call("cached_attention", 90, BF16, 32, 80, form=("a cache in k8v4",))
    reasons = {r.kernel.name: r.reason for r in plan(of_cache, DispatchConfig()).refused}
    assert reasons["triton_cached_attention"] == "does not take a cache in k8v4"
    assert reasons[CUDA] == "K = 80 is none of 64, 128, 256"
    kernel = quantized.KERNELS[0]
    assert kernel.refusal(Call("cached_attention", 90, BF16, 32, 128)) == "takes a cache in fp8 or a cache in k8v4 or a cache in nvfp4 only"
    many = Call("cached_attention", 90, BF16, 32, 128, form=("a cache in fp8", "attention that is not causal"))
    assert kernel.refusal(many) == "does not take attention that is not causal"


def a_call(name="k8v4", q=1, d=64, slots=80, rollback=8, **options) -> CachedCall:
    f = kv.FORMATS[name]
    query, key, value = torch.randn(2, 8, q, d).to(BF16), *torch.randn(2, 2, 2, q, d).to(BF16)
    rows = [kv.empty(kind, (2, 2, slots), d, torch.device("cpu")) for kind in (f.key, f.value)]
    exact = [torch.zeros(2, 2, kv.exact_slots(slots, rollback), d, dtype=BF16) if f.exact else None for _ in range(2)]
    stored = Stored(rows[0].scale, rows[1].scale, torch.zeros(2, 2, d), rows[1].blocks, rows[0].blocks, *exact)
    counters = torch.zeros(4, dtype=torch.int32)
    c = CachedCall(query, key, value, rows[0].codes, rows[1].codes, torch.tensor(7), arrivals=counters, stored=stored)
    return c._replace(**options)


def test_what_a_call_asks_for():
    assert select.cached_form(a_call("nvfp4", q=2)) == ("a cache in nvfp4", "several queries")
    few = "exact tokens of which the new ones would overwrite some"
    assert few in select.cached_form(a_call("nvfp4", q=2, rollback=0)) and few not in select.cached_form(a_call("nvfp4", rollback=0))
    c = a_call()
    apart = c._replace(keys=torch.zeros(2, 80, 2, 64, dtype=torch.int8).transpose(1, 2))
    scales = c._replace(stored=c.stored._replace(key_scale=torch.zeros(2, 80, 2, dtype=torch.float16).transpose(1, 2)))
    for other in (apart, scales):
        assert select.cached_form(other) == ("a cache in k8v4", "parts of a cache that are not contiguous")


# --- the launcher -----------------------------------------------------------------------------------------------

launched = functools.partial(one_launch.launched, run=quantized.quantized, kernel=(triton_quantized, "cached_attention_quantized"))


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_passed_as_they_lie(name):
    c = a_call(name, q=3)
    grid, given = launched(c, StepConfig(32, 3))
    assert grid == (2 * 2 * 3,)
    s = c.stored
    tensors = dict(Q=c.query, KEY=c.key, VALUE=c.value, K=c.keys, V=c.values, K_SCALE=s.key_scale, V_SCALE=s.value_scale, MEAN=s.key_mean)
    tensors |= dict(K_BLOCKS=s.key_blocks, V_BLOCKS=s.value_blocks, EXACT_K=s.exact_keys, EXACT_V=s.exact_values, POSITION=c.position, ARRIVALS=c.arrivals)
    for argument, tensor in tensors.items():
        assert (given[argument] is None) == (tensor is None), argument
        assert tensor is None or given[argument].data_ptr() == tensor.data_ptr(), argument
    assert {given[n].dtype for n in ("K", "V")} == {torch.uint8}
    assert (given["SLOTS"], given["EXACT_SLOTS"], given["QUERIES"], given["GROUP"]) == (80, 76 if name == "nvfp4" else 0, 3, 4)
    kinds = {"fp8": (0, 0, False), "k8v4": (1, 2, False), "nvfp4": (2, 2, True)}
    assert (given["K_KIND"], given["V_KIND"], given["EXACT"]) == kinds[name]
    assert (given["FIRST"], given["LAST"], given["BLOCK_N"], given["BLOCK_D"]) == (4, 64, 4, 64)
    assert given["PDL"] and given["launch_pdl"] and not launched(c, arch=89)[1]["PDL"]


def test_the_numbers_of_a_kind_are_those_of_the_formats():
    """The kernel has the kinds by number; both files must mean the same."""
    assert {kind.name: number for kind, number in quantized.KINDS.items()} == {
        name.lower(): getattr(triton_quantized, name).value for name in ("FP8", "INT8", "NVFP4")
    }
