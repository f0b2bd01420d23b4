"""fp4.decode_attention without a GPU: numerics in Triton's interpreter, machine code of every architecture, which row serves what, the launcher's arguments."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels import forms, host, registry
from fp4_inductor.kernels.cached_attention import composed
from fp4_inductor.kernels.decode_attention import by_sdpa, cuda, masked, split, triton_masked, triton_split
from fp4_inductor.kernels.select import Call, attention_form, plan
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.kernels import aot, attention_aot
from lowering_tests.kernels.test_aot import SHARED, assert_fits, global_atomics
from lowering_tests.own_process import cases_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("every", "counts"), [
    ("", {"attention": 74, "counted": 24, "unread": 40, "codes": 44, "strided": 3, "apart:": 2}),
    pytest.param("1", {"attention": 114, "counted": 24, "unread": 40, "codes": 44, "strided": 3, "apart:": 2}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_in_the_interpreter(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_attention.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


@pytest.mark.parametrize(("every", "counts"), [
    ("", {"masked": 24, "unread": 8, "packed": 24}), pytest.param("1", {"masked": 81, "unread": 36, "packed": 72}, marks=pytest.mark.slow),
], ids=["some", "every"])  # fmt: skip
def test_many_queries_in_the_interpreter(every, counts, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_masked.py"))
    assert Counter(c["case"].split()[0] for c in cases) == counts


# --- machine code -----------------------------------------------------------------------------------------------


# The usual width in both forms, the smallest and the one that takes most registers; on the other architectures the last alone, and none that copies as
# sm_80 or sm_120 does. Both forms of every width, everywhere, with --slow.
STEPS = [
    pytest.param(90, d, batch, marks=[pytest.mark.slow] if d in (80, 96) or (d != 128 and batch > 1) else [])
    for d in (64, 80, 96, 128, 256)
    for batch in (1, 32)
]
OTHERS = ((80, 1), (128, 1), (128, 32), (256, 1))
STEPS += [pytest.param(cc, d, batch, marks=[pytest.mark.slow] if d < 256 else []) for cc in (80, 120) for d, batch in OTHERS]
STEPS += [pytest.param(cc, d, batch, marks=[pytest.mark.slow] if d < 256 or cc != 100 else []) for cc in (89, 100, aot.GB10) for d, batch in OTHERS]
MASKS_COMPILED = [(90, 0, False, 1), (90, 1, True, 4), (90, 2, True, 2)]
MASKS_COMPILED += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((120, 2, True, 2), (80, 3, False, 4), (80, 2, True, 2), (90, 2, False, 1), (90, 3, False, 1), (90, 3, False, 4), (120, 3, False, 1))
]


@pytest.mark.parametrize(("cc", "d", "batch"), STEPS)
def test_a_decode_step(cc, d, batch):
    """As Transformers calls it over a StaticCache: K and V are copied 16 bytes at a time while others are computed with."""
    done, c = attention_aot.split(cc, d, batch=batch)
    assert (c.splits == 1) == (batch == 32)
    assert_fits(done, c.num_warps, cc, blocks=2)
    copies = {op: n for op, n in done.opcodes().items() if op.startswith(("LDG", "UBLKCP"))}
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in copies), copies
    assert "LDG.E.U16" not in copies, "nothing of the cache is loaded element by element"
    assert done.count("HMMA") > 0
    assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "mask_kind", "per_row", "queries"), MASKS_COMPILED)
def test_other_masks(cc, mask_kind, per_row, queries):
    for splits in (1, 9):
        tile = split.attention(1, 8, 520, 128, 132, cc, per_row)
        tile = split.AttentionConfig(tile.block_s, splits, tile.num_warps, tile.num_stages)
        done, c = attention_aot.split(cc, 128, queries=queries, mask_kind=mask_kind, per_row=per_row, tile=tile)
        assert_fits(done, c.num_warps, cc)
        assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in done.opcodes())


# E4M3 is the second kind; INT8 has the same instructions on every architecture.
CODED = [
    (80, (2, 2), {}), (100, (2, 2), {}), (90, (1, 2), dict(d=256)), (90, (2, 2), dict(queries=4, per_row=True)), (120, (2, 2), dict(batch=32)),
    *[pytest.param(cc, (1, 1), {}, marks=pytest.mark.slow) for cc in (80, 90, 100, 120)],
    *[pytest.param(*case, marks=pytest.mark.slow) for case in ((90, (2, 2), {}), (120, (2, 2), {}), (80, (1, 1), dict(queries=4, per_row=True)))],
]  # fmt: skip


@pytest.mark.parametrize(("cc", "kinds", "call"), CODED, ids=str)
def test_keys_and_values_in_8_bits(cc, kinds, call):
    """Codes are copied 8 bytes at a time and more while others are computed with, and become numbers of float16 in registers, without a table."""
    done, c = attention_aot.split(cc, kinds=kinds, **call)
    assert_fits(done, c.num_warps, cc)
    copies = [op for op in done.opcodes() if op.startswith("LDGSTS")]
    assert copies and all(op.startswith(("LDGSTS.E.64", "LDGSTS.E.BYPASS.128")) for op in copies), copies
    assert done.count("HMMA") > 0
    assert sum(n for op, n in done.opcodes().items() if op.startswith("I2F")) <= 4, "of divisions of sizes, not of codes"


@pytest.mark.parametrize(("cc", "d", "queries"), [
    (90, 128, 2048), (90, 256, 2048), (100, 128, 2048), (120, 128, 2048),
    *(pytest.param(cc, *case, marks=pytest.mark.slow) for cc, *case in ((90, 64, 2048), (90, 128, 20), (80, 128, 2048), (80, 256, 2048), (100, 256, 2048))),
])  # fmt: skip
def test_many_queries(cc, d, queries):
    """Tensor cores of the architecture, and keys and values that are copied while others are computed with."""
    done, t = attention_aot.masked(cc, d, queries)
    if d == 256 and t.block_m == 128:  # 128 queries of wide heads: see tile_of()
        assert done.spills <= 48 and done.shared <= SHARED[cc] * 1024
    else:
        assert_fits(done, t.num_warps, cc)
    assert done.count({90: "HGMMA" if t.block_m >= 64 else "HMMA", 100: "UTCHMMA" if t.block_m >= 64 else "HMMA"}.get(cc, "HMMA")) > 0
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in done.opcodes())
    assert not global_atomics(done)


@pytest.mark.parametrize(("length", "dtype"), [(1, "fp16"), (4104, "bf16"), (100_000, "bf16")])
def test_other_lengths(length, dtype):
    done, c = attention_aot.split(90, 128, length=length, dtype=dtype)
    assert_fits(done, c.num_warps, 90, blocks=2)


@pytest.mark.parametrize(("cc", "d", "splits"), [(90, 64, 2), (90, 80, 33), (90, 128, 9), (90, 256, 64), (80, 256, 64), (100, 256, 64), (120, 256, 64)])
def test_combine(cc, d, splits):
    done = attention_aot.combine(cc, d, splits)
    assert_fits(done, 4, cc, blocks=2)
    assert not global_atomics(done)


# --- selection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [0, 80, 89, 90, 100, 120, 121])
def test_which_calls_the_kernel_serves(arch):
    def kernel(m, d=128, dtype=BF16, shared=True, **thresholds):
        form = attention_form(d, shared_mask=shared)
        return plan(Call("decode_attention", arch, dtype, 32, d, form=form), DispatchConfig(thresholds=thresholds)).pick(m).kernel

    few, many = ("triton_decode_attention", "triton_masked_attention") if arch else ("sdpa", "sdpa")
    for d in (8, 64, 80, 96, 128, 256):
        assert [kernel(m, d) for m in (1, 4, 16, 17, 4096)] == [few] * 3 + [many] * 2
        assert [kernel(m, d, shared=False) for m in (1, 16, 17)] == [few] * 2 + ["sdpa"]
    assert kernel(4, dtype=FP16) == few and kernel(17, dtype=FP16) == many
    assert {kernel(m, *call) for m in (4, 17) for call in ((128, FP32), (512,), (36,))} == {"sdpa"}
    assert kernel(4, attention=0) == many


@pytest.mark.parametrize("arch", [0, 80, 90, 120])
def test_which_kernel_serves_codes(arch):
    off = [on.off for on in registry.named("decode_attention")["triton_codes_attention"].on if on.holds(arch)]

    def kernel(m, d=128, dtype=BF16, config=None):
        config = replace(config or DispatchConfig(), candidates=("triton_codes_attention",) if any(off) else ())
        return plan(Call("decode_attention", arch, dtype, 32, d, form=attention_form(d, codes=True)), config).pick(m).kernel

    assert [kernel(m) for m in (1, 16, 17)] == ["triton_codes_attention" if arch else "sdpa"] * 2 + ["sdpa"]
    assert {kernel(4, dtype=FP32), kernel(4, 512), kernel(4, 40), kernel(4, config=DispatchConfig(thresholds={"attention": 0}))} == {"sdpa"}


@pytest.mark.parametrize("processors", [46, 108, 132, 148])
@pytest.mark.parametrize("length", [1, 16, 520, 4104, 131072])
@pytest.mark.parametrize("heads", [1, 8, 64, 256, 4096])
def test_parts_fill_the_gpu_and_no_part_is_idle(heads, length, processors):
    for d in (64, 256):
        c = split.attention(1, heads, length, d, processors, 90)
        assert 1 <= c.splits <= max(1, -(-length // c.block_s))
        assert c.splits == 1 or heads * c.splits <= 3 * processors
        assert heads * c.splits >= 1.3 * processors or c.splits in (64, -(-length // c.block_s))


# --- the launcher -----------------------------------------------------------------------------------------------


def launched(query, key, value, mask=None, tile=None, arch=90, **scales):
    """``[(grid, arguments by name)]`` of the kernels that :func:`split.split` would run."""
    calls = []
    with (
        mock.patch.multiple(host, arch=mock.Mock(return_value=arch), processors=mock.Mock(return_value=132)),
        mock.patch.object(triton_split, "decode_attention_split", _Spy(triton_split.decode_attention_split, calls)),
        mock.patch.object(triton_split, "decode_attention_combine", _Spy(triton_split.decode_attention_combine, calls)),
    ):
        split.split(query, key, value, mask, 0.1, tile, **scales)
    return calls


class _Spy:
    def __init__(self, kernel, calls):
        self.names, self.calls = kernel.arg_names, calls

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            given = dict(zip(self.names, args, strict=False)) | kwargs
            options = {name: given.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in given}
            assert set(given) == set(self.names)
            self.calls.append((grid, given | options))

        return run


def operands(b, h, kv, q, s, d):
    return torch.empty(b, h, q, d, dtype=BF16), *(torch.empty(b, kv, s, d, dtype=BF16) for _ in range(2))


def test_a_cache_is_passed_as_it_lies():
    query, key, value = operands(8, 32, 8, 1, 4096, 128)
    ((grid, first), (rows, second)) = launched(
        query.transpose(1, 2).contiguous().transpose(1, 2), key[:, :, :520], value.transpose(1, 2).contiguous().transpose(1, 2)
    )
    assert grid == (8 * 8 * first["SPLITS"],) and rows == (8 * 32,)
    assert first["K"].data_ptr() == key.data_ptr()
    assert [first[f"stride_k{x}"] for x in "bhs"] == [8 * 4096 * 128, 4096 * 128, 128]
    assert [first[f"stride_v{x}"] for x in "bhs"] == [8 * 4096 * 128, 128, 8 * 128]
    assert first["GROUP"] == 4 and first["PDL"] and second["PDL"] and first["launch_pdl"] and second["launch_pdl"]
    assert not launched(query, key, value, arch=89)[0][1]["PDL"]
    assert [second[name].data_ptr() for name in ("PEAK", "SUM", "PARTIAL")] == [first[name].data_ptr() for name in ("PEAK", "SUM", "PARTIAL")]
    sizes = [first[name].numel() for name in ("PEAK", "SUM", "PARTIAL")]
    assert sizes == [8 * 32 * first["SPLITS"]] * 2 + [8 * 32 * 128 * first["SPLITS"]]


MASKS = [
    # (shape, H, Q, whether the queries of a KV head have masks of their own); B = 2, two KV heads, S = 70
    ((1, 1, 1, 70), 8, 1, False), ((2, 1, 1, 70), 8, 1, False), ((2, 8, 1, 70), 8, 1, True), ((2, 2, 1, 70), 2, 1, False),
    ((2, 1, 3, 70), 8, 3, True), ((2, 1, 1, 70), 8, 3, False), ((1, 1, 1, 1), 8, 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "h", "q", "per_row"), MASKS)
def test_a_mask_is_never_expanded_in_memory(shape, h, q, per_row):
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape)):
        ((_, given),) = launched(*operands(2, h, 2, q, 70, 64), mask, split.AttentionConfig(64, 1))
        assert given["MASK"].data_ptr() == mask.data_ptr()
        assert given["PER_ROW"] == per_row and given["MASK_KIND"] == (1 if mask.dtype == torch.bool else 2)
        strides = [given[f"stride_m{x}"] for x in "bhqs"]
        assert all(stride == 0 or have == want for stride, have, want in zip(strides, shape, (2, h, q, 70), strict=True))
        assert given["OUT"].shape == (2, q, h, 64)


@pytest.mark.parametrize(("shape", "sequences"), [((2, 1, 40, 70), 2), ((1, 1, 40, 70), 1), ((2, 1, 1, 70), 2), ((1, 1, 40, 1), 1)])
def test_a_mask_of_many_queries_is_packed_where_it_lies(shape, sequences):
    query, key, value = operands(2, 8, 2, 40, 70, 64)
    mask, calls = torch.ones(shape, dtype=torch.bool), []
    with (
        mock.patch.object(host, "arch", return_value=90),
        mock.patch.object(triton_masked, "pack_mask", _Spy(triton_masked.pack_mask, calls)),
        mock.patch.object(triton_masked, "masked_attention", _Spy(triton_masked.masked_attention, calls)),
    ):
        out = masked.masked(query, key, value.transpose(1, 2).contiguous().transpose(1, 2), mask, -0.5)
    (packs, pack), (programs, given) = calls
    assert packs == (2, 1, sequences) and programs == (2 * 8,) and out.shape == (2, 40, 8, 64)
    assert pack["MASK"].data_ptr() == mask.data_ptr() and pack["BLOCK_M"] == given["BLOCK_M"] == 64
    assert [pack[name].data_ptr() for name in ("FOUND", "SEEN", "BITS")] == [given[name].data_ptr() for name in ("FOUND", "SEEN", "BITS")]
    assert (pack["stride_q"], pack["stride_s"]) == (0 if shape[2] == 1 else shape[3], 0 if shape[3] == 1 else 1)
    assert given["SEQUENCES"] == sequences and given["BLOCKS"] == 2 and given["GROUP"] == 4 and given["scale"] > 0
    assert [given[f"stride_v{x}"] for x in "bhs"] == [8960, 64, 128]


def test_codes_and_scales_are_passed_as_they_lie():
    query, key, value = operands(2, 8, 2, 1, 70, 64)
    key, value = key.to(torch.int8).transpose(1, 2).contiguous().transpose(1, 2), value.to(torch.float8_e4m3fn)
    of_token, of_head = torch.rand(2, 2, 70, 1).to(BF16), torch.rand(1, 2, 1, 1)
    ((_, given),) = launched(query, key, value, None, split.AttentionConfig(64, 1), key_scale=of_token, value_scale=of_head)
    for name, t in (("K", key), ("V", value), ("K_SCALE", of_token), ("V_SCALE", of_head)):
        assert given[name].data_ptr() == t.data_ptr() and given[name].dtype == (t.dtype if "SCALE" in name else torch.uint8)
    assert [given[f"stride_{x}"] for x in ("kb", "kh", "ks", "xb", "xh", "xs", "yb", "yh", "ys")] == [8960, 64, 128, 140, 70, 1, 0, 1, 0]
    assert (given["K_KIND"], given["V_KIND"]) == (triton_split.INT8.value, triton_split.FP8.value)
    ((_, given),) = launched(*operands(2, 8, 2, 1, 70, 64), None, split.AttentionConfig(64, 1))
    assert given["K_KIND"] == given["V_KIND"] == triton_split.DENSE.value and given["K_SCALE"] is None


def test_the_library_serves_the_rest_on_a_gpu():
    query, key, value = operands(2, 4, 2, 3, 20, 64)
    row = mock.Mock(implementation=registry.named("decode_attention")["sdpa"])
    with (
        mock.patch.object(host, "row_for", return_value=row),
        mock.patch.object(by_sdpa, "sdpa", return_value="library") as library,
        mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()),
    ):
        assert cuda.decode_attention(query, key, value) == "library"
    library.assert_called_once()
    empty = cuda.decode_attention(query, key[:, :, :0], value[:, :, :0])
    assert empty.shape == (2, 3, 4, 64) and not empty.any()


def test_a_position_takes_the_place_of_a_mask():
    query, key, value = operands(8, 32, 8, 1, 4096, 128)
    position = torch.tensor(519)
    with (
        mock.patch.multiple(host, arch=mock.Mock(return_value=90), processors=mock.Mock(return_value=132)),
        mock.patch.object(triton_split, "decode_attention_split", spy := mock.MagicMock()),
    ):
        split.split(query, key, value, None, 0.1, split.AttentionConfig(64, 1), position)
    given = dict(zip(triton_split.decode_attention_split.arg_names, spy[(64,)].call_args.args, strict=False)) | spy[(64,)].call_args.kwargs
    assert given["MASK"] is position and given["MASK_KIND"] == 3 and given["LENGTH"] == 4096
    assert given["BALANCED"] and not given["PER_ROW"] and given["SCAN"] == 128


COUNTED = {
    "a step": ({}, {}, True),
    "four queries": (dict(q=4), {}, True),
    "a prompt": (dict(q=5), {}, False),
    "float32": (dict(dtype=FP32), {}, False),
    "a mask": ({}, dict(mask=torch.ones(1, 1, 1, 40, dtype=torch.bool)), False),
    "a window": ({}, dict(window=8), False),
    "sinks": ({}, dict(sinks=torch.zeros(8)), False),
    "a soft-cap": ({}, dict(softcap=1.0), False),
    "an empty cache": ({}, dict(empty=True, position=torch.tensor(0)), False),
}


@pytest.mark.parametrize("case", COUNTED)
def test_which_calls_in_several_launches_read_the_counter_in_the_kernel(case, monkeypatch):
    sizes, options, counted = COUNTED[case]
    q, dtype = sizes.get("q", 1), sizes.get("dtype", BF16)
    query, key, value = torch.randn(2, 8, q, 64).to(dtype), *torch.randn(2, 2, 2, q, 64).to(dtype)
    keys, values = torch.zeros(2, 2, 2, 40, 64, dtype=dtype)
    call = CachedCall(query, key, value, keys, values, **{"position": torch.tensor(7)} | options)
    seen = []

    def ours(query, keys, values, mask, scale, position):
        seen.append((keys.data_ptr(), mask, scale, position, bool(keys[:, :, 7].any())))
        return query.transpose(1, 2)

    monkeypatch.setattr(composed, "known", lambda c: 0 if c.empty else None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(host, "row_for", lambda op, x, m, n, k, form=(): plan(Call(op, 90, x.dtype, n, k, form=form), DispatchConfig()).pick(m))
    monkeypatch.setattr(forms, "source", lambda name: ours)  # which keeps what it found
    composed.apart(call)
    # After the append, on the whole cache where it lies.
    assert seen == ([(keys.data_ptr(), None, 0.125, call.position, True)] if counted else [])
