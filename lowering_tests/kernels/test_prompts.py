"""Prompts over a KVCache in 8 and 4 bits, without a GPU: the kernels' numerics in Triton's interpreter, machine code, and which calls they serve."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor import errors
from fp4_inductor.config import DispatchConfig
from fp4_inductor.formats import kv
from fp4_inductor.kernels import select
from fp4_inductor.kernels.asked import EMPTY, NO_COUNTERS, NOT_PLAIN, OTHER_SIZE, OVERWRITTEN, TURNS, cache_in
from fp4_inductor.kernels.cached_attention import prefill
from fp4_inductor.kernels.cached_attention.append import rows_config
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels import prompt_aot
from lowering_tests.kernels.test_aot import A_FEW_SPILLS, SHARED, assert_fits
from lowering_tests.kernels.test_quantized_attention import a_call
from lowering_tests.own_process import cases_of

FORMATS = tuple(kv.FORMATS)


@pytest.mark.parametrize(("every", "counts"), [
    ("", {"mean": 19, "written": 63, "returned": 63, "full": 9, "dequantize": 10, "old": 8, "new": 8}),
    pytest.param("1", {"mean": 51, "written": 141, "returned": 141, "full": 9, "dequantize": 30, "old": 15, "new": 15}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_appending_and_dequantizing_have_the_bits_of_the_formats(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_append.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


@pytest.mark.parametrize(("every", "counts"), [
    ("", {"prefill": 102, "written": 96, "same": 7, "unusual": 6, "full": 4}),
    pytest.param("1", {"prefill": 328, "written": 312, "same": 7, "unusual": 16, "full": 18}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_attention_against_float64(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_prefill.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


# --- machine code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "d"), [
    ("k8v4", 128), ("nvfp4", 256), *(pytest.param(name, d, marks=pytest.mark.slow) for name, d in (("fp8", 128), ("nvfp4", 64), ("nvfp4", 128))),
])  # fmt: skip
def test_rows_are_moved_16_bytes_at_a_time(name, d):
    """Two programs of each fit on a multiprocessor, whose registers are the limit: 64 Ki."""
    blocks = sum(kind.blocks for kind in (kv.FORMATS[name].key, kv.FORMATS[name].value))
    for new in (True, False):
        done = prompt_aot.rows(90, name, new, d)
        opcodes = done.opcodes()
        assert done.spills <= A_FEW_SPILLS  # the stack is that of exact divisions, which call a function for unusual numbers
        assert 2 * rows_config(d).num_warps * 32 * -(-done.registers // 8) * 8 <= 65536
        assert opcodes["LDG.E.128"] and opcodes["STG.E.128"]
        assert opcodes["STG.E.U8" if new else "LDG.E.U8"] == blocks, "block scales alone are moved byte by byte"


PROMPTS = [
    (90, "nvfp4", dict(d=256)), (90, "bf16", {}), (90, "nvfp4", dict(queries=20)), (90, "nvfp4", dict(window=1024, others=True)),
    (80, "nvfp4", {}), (100, "nvfp4", dict(queries=64, parts=8)),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in (
        (90, "nvfp4", {}), (90, "nvfp4", dict(queries=50)), (90, "bf16", dict(window=1024, others=True, d=256)), (90, "nvfp4", dict(dtype="fp16", window=128)),
        (90, "bf16", dict(queries=5, parts=33)), (90, "nvfp4", dict(queries=64, parts=8, others=True, window=1024)),
        (80, "nvfp4", dict(d=256, others=True)), (80, "bf16", dict(window=1024)), (90, "bf16", dict(queries=20, d=256)), (120, "nvfp4", dict(others=True)),
        (90, "nvfp4", dict(d=64)), (120, "nvfp4", {}), *((cc, "nvfp4", dict(queries=64, parts=8)) for cc in (80, 90, 120)),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("cc", "name", "call"), PROMPTS, ids=lambda x: str(x).replace(" ", ""))
def test_a_prompt(cc, name, call):
    """Tensor cores of the architecture, tiles that are copied while others are computed with, and no spills."""
    done, t = prompt_aot.attention(cc, name, **call)
    assert_fits(done, t.num_warps, cc)
    opcodes = done.opcodes()
    assert done.count({90: "HGMMA" if t.block_m >= 64 else "HMMA", 100: "UTCHMMA"}.get(cc, "HMMA")) > 0
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in opcodes)
    assert "others" in call or not any(op.startswith("LDG.E.U8") for op in opcodes), "only a mask is loaded byte by byte"


@pytest.mark.parametrize("arch", [80, 86, 90, 120])
def test_every_tile_fits_in_shared_memory(arch):
    """Q, and K and V of each stage."""
    for queries, d, crowded in itertools.product((17, 33, 64, 65, 8192), (64, 128, 256), (False, True)):
        t = prefill.config(queries, d, arch, crowded)
        assert (t.block_m + 2 * t.block_n * t.num_stages) * d * 2 <= SHARED[arch] * 1024, t


def a_prompt(queries, filled, batch=1, d=128, group=4, **options) -> CachedCall:
    """Over a cache of 8 KV heads that ``queries`` tokens behind ``filled`` fill."""
    meta = dict(dtype=torch.bfloat16, device="meta")
    query, new, cache = (torch.empty(batch, *shape, d, **meta) for shape in ((8 * group, queries), (8, queries), (8, filled + queries)))
    return CachedCall(query, new, new, cache, cache, torch.empty((), dtype=torch.int64, device="meta"), **options)


def test_keys_are_divided_if_tiles_alone_do_not_fill_the_gpu():
    def tile(*shape, arch=90, **more):
        c = a_prompt(*shape, **more)
        t = prefill.config_of(c, c.slots, False, arch, 132)
        rows = shape[0] * 4 if t.packed else shape[0]
        return t, c.query.shape[0] * (8 if t.packed else 32) * -(-rows // t.block_m)

    for shape in ((16, 8192), (64, 8192), (256, 8192), (64, 32768), (16, 8192, 8)):
        t, tiles = tile(*shape)
        assert t.packed and t.parts > 1 and tiles < 132 and 0.9 * 132 <= tiles * t.parts <= 264, (shape, t, tiles)
    for shape in ((512, 8192), (8192, 0), (64, 8192, 64), (17, 0), (64, 40)):
        t, tiles = tile(*shape)
        assert t.parts == 1, (shape, t, tiles)
    assert not tile(300, 8192)[0].packed and tile(300, 8192)[0].parts > 1


def test_what_ends_first():
    """Not more parts than a wave of programs has room for, and none that are hardly longer than what a program takes at its begin."""
    parts = {steps: [prefill.parts_of(tiles, 64 * steps, 132, 64) for tiles in (1, 16, 60, 96, 131, 132)] for steps in (8, 32, 128, 512)}
    assert parts == {8: [1] * 6, 32: [8, 8, 2, 1, 1, 1], 128: [32, 8, 2, 4, 1, 1], 512: [64, 8, 2, 4, 1, 1]}


# --- selection --------------------------------------------------------------------------------------------------

PREFILL, APART, ONE = "triton_prefill_attention", "append + attention", "cuda_quantized_attention"


def kernel(m, *form, config=None, arch=90, **more):
    call = Call("cached_attention", arch, torch.bfloat16, 32, 128, form=form)
    on = (PREFILL,) if any(on.off for on in prefill.KERNELS[0].on) else ()
    return plan(replace(call, **more), replace(config or DispatchConfig(), candidates=on)).pick(m).kernel


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_which_calls_it_serves(arch):
    """Exact tokens, and whatever else torch's attention would need a mask for."""
    for name in FORMATS:
        cache = cache_in(name)
        assert [kernel(m, cache, OTHER_SIZE, arch=arch) for m in (16, 17, 10**6)] == [ONE, PREFILL, PREFILL]
        assert kernel(2048, cache, EMPTY, arch=arch) == (PREFILL if name == "nvfp4" else APART)
        assert kernel(2048, cache, EMPTY, NOT_PLAIN, OVERWRITTEN, NO_COUNTERS, TURNS, arch=arch) == PREFILL
        assert kernel(2048, cache, "attention that is not causal", arch=arch) == APART
        assert kernel(2048, cache, arch=arch, config=DispatchConfig(thresholds={"prefill_attention": 0})) == APART
        off = DispatchConfig(thresholds={"step_attention": 0, "cuda_attention": 0, "attention": 0})
        assert [kernel(m, cache, arch=arch, config=off) for m in (1, 16, 17)] == [APART, APART, PREFILL]
    assert [kernel(m, OTHER_SIZE, arch=arch) for m in (16, 17)] == ["triton_cached_attention", PREFILL]
    assert kernel(2048, EMPTY, arch=arch) == APART and kernel(2048, EMPTY, NOT_PLAIN, arch=arch) == PREFILL
    assert kernel(2048, arch=arch, dtype=torch.float32) == APART


def test_what_a_prompt_asks_for():
    c = a_call("nvfp4", q=9, slots=80, rollback=0, empty=True)
    assert select.cached_form(c) == (cache_in("nvfp4"), OVERWRITTEN, EMPTY)
    mask = torch.ones(2, 1, 1, 80, dtype=torch.bool)
    for other in (dict(window=8), dict(softcap=2.0), dict(sinks=torch.zeros(8)), dict(mask=mask)):
        asked = select.cached_form(c._replace(**other))
        assert NOT_PLAIN in asked and set(asked) <= set(prefill.SERVES), asked
    assert NOT_PLAIN not in select.cached_form(c._replace(window=9)) + select.cached_form(c._replace(empty=False, softcap=2.0))


def test_a_prompt_that_cannot_fit_is_refused():
    with pytest.raises(errors.ShapeError, match=r"the cache is full.*0 \+ 81 tokens"):
        prefill.prefill(a_call("k8v4", q=81, slots=80))
