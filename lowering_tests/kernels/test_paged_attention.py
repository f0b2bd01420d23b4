"""fp4.paged_attention without a GPU: csrc/attention/pages.cuh on a CPU and torch's operators against float64, which calls the kernels serve."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import ConfigError, DTypeError, KernelError, ShapeError
from fp4_inductor.kernels import csrc, params
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.kernels.paged_attention import cuda, gathered
from fp4_inductor.kernels.select import plan
from fp4_inductor.ops import paged_attention as contract
from fp4_inductor.ops.paged_attention import PagedCall
from lowering_tests.kernels.emulator import EmulatorError, compiler, emulated

CPU = torch.device("cpu")
F16, BF16, F32, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
EARLY = ("table", "lengths", "slots", "keys", "values")  # read before the PDL wait of a call that is early
needs_emulator = pytest.mark.skipif(compiler() is None, reason="needs g++")


def fresh(c: PagedCall) -> PagedCall:
    return PagedCall(*(t.clone() if isinstance(t, torch.Tensor) else t for t in c))


def run(c: PagedCall, tile: tuple[int, int] = (0, 0), arch: int = 90, constants: tuple[str, ...] = ()) -> torch.Tensor:
    """Scales are weights, which no kernel of a step writes."""
    kernel = emulated((cuda.LIBRARY_OF_FP8 if cuda.is_in_codes(c) else cuda.LIBRARY).source, arch)
    scales = ("key_scale", "value_scale") if cuda.is_in_codes(c) else ()
    return kernel.run(params.PagedParams, cuda.fields(c, tile), c.out, changed=[c.keys, c.values], constants=(*constants, *scales))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == F8:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def check(c: PagedCall, tile: tuple[int, int] = (0, 0), **how) -> torch.Tensor:
    """Against float64: the result, and exactly what was written. Twice: the same bits."""
    assert cuda.paged_form(c) == (("a cache in fp8",) if cuda.is_in_codes(c) else ())
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    contract.CONTRACT.reference(*theirs)
    got = run(ours, tile, **how)
    assert distance(got, theirs.out) <= contract.CONTRACT.tolerance[c.query.dtype]
    assert same(ours.keys, theirs.keys) and same(ours.values, theirs.values)
    assert torch.equal(run(again, tile, **how), got)
    return got


@needs_emulator
@pytest.mark.parametrize("tile", [(0, 0), (1, 3), (2, 4), (3, 3), (7, 4), (16, 3)])
def test_lengths(tile):
    """One token, the edges of tiles and of pages, more tiles than warps, warps and blocks without a tile, no sequence."""
    for lengths, page in (((1, 40, 17, 0), 16), ((15, 16, 33, 32), 32), ((95, 96, 97, 340), 48)):
        check(contract.call(CPU, lengths, page, 8, 2, 64, BF16), tile)
    check(contract.call(CPU, (1200,), 16, 4, 1, 64, F16), tile)


@needs_emulator
@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize(("d", "group"), [(64, 1), (64, 8), (64, 11), (128, 4), (128, 7), (128, 16)])
def test_shapes(arch, d, group):
    for dtype in (F16, BF16):
        check(contract.call(CPU, (70, 3), 16, 2 * group, 2, d, dtype, scale=0.3), (2, 4), arch=arch)


@needs_emulator
@pytest.mark.parametrize("tile", [(0, 0), (1, 3), (2, 7), (7, 3), (16, 7)])
def test_lengths_in_fp8(tile):
    for lengths, page in (((1, 40, 17, 0), 16), ((15, 16, 33, 32), 32), ((95, 96, 97, 340), 48)):
        check(contract.call(CPU, lengths, page, 8, 2, 64, BF16, codes=1), tile)
    check(contract.call(CPU, (1200,), 16, 4, 1, 64, F16, codes=1), tile)


@needs_emulator
@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize(("d", "group"), [(64, 1), (64, 11), (128, 4), (128, 16)])
def test_shapes_in_fp8(arch, d, group):
    """A scale of all tokens, and one of each KV head."""
    for dtype, codes in ((F16, 2), (BF16, 1)):
        check(contract.call(CPU, (70, 3), 16, 2 * group, 2, d, dtype, scale=0.3, codes=codes, window=40), (2, 7), arch=arch)
    check(contract.call(CPU, (70, 3), 16, 2 * group, 2, d, BF16, softcap=1.5, sinks=True, codes=2), (1, 3), arch=arch)


@needs_emulator
def test_what_e4m3_cannot_hold():
    """A new token beyond the range is the largest number, NaN and Inf among old ones stay where they are; heads of other scales."""
    c = contract.call(CPU, (70, 40), 16, 4, 2, 64, F16, codes=2)
    c.key_scale.copy_(torch.tensor([0.5, 1e-4])), c.value_scale.copy_(torch.tensor([1e-4, 2.0]))
    c.key[0, 0, 3], c.value[1, 0, 7] = 60_000.0, -60_000.0
    check(c)
    c.keys[c.table[0, 1].long(), 3, 1, 5] = float("nan")
    got = run(fresh(c), (2, 7))
    assert got[0, 2:].isnan().all() and not got[0, :2].isnan().any() and not got[1].isnan().any()
    c.value[1, 1, 9] = float("nan")
    got = run(fresh(c), (2, 7))
    assert got[1, 2:, 9].isnan().all() and not got[1, :2].isnan().any() and int(got[1].isnan().sum()) == 2


@needs_emulator
def test_options():
    for window in (1, 5, 16, 33, 1000):
        check(contract.call(CPU, (70, 3, 260), 16, 4, 2, 64, F16, window=window), (2, 3))
    check(contract.call(CPU, (70, 3, 0), 16, 4, 2, 64, F16, sinks=True), (1, 4))
    check(contract.call(CPU, (70, 3), 16, 4, 2, 128, BF16, softcap=1.5, window=30, sinks=True), (2, 4))


@needs_emulator
def test_a_token_that_is_not_written():
    c = contract.call(CPU, (20, 33), 16, 4, 2, 64, F16)
    c.slots[1] = -1
    before = c.keys.clone()
    check(c)
    run(c)
    row = int(c.table[1, 32 // 16]), 32 % 16
    assert same(c.keys[row], before[row]) and not same(c.keys, before)


@needs_emulator
def test_strides():
    """Rows of one product for query, key and value; a cache whose heads are apart; a table that is wider than what it is cut from."""
    c = contract.call(CPU, (20, 33), 16, 4, 2, 64, F16)
    q, k, v = torch.randn(2, 8 * 64).to(F16).split([256, 128, 128], 1)
    keys, values = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (c.keys, c.values))
    rows = dict(query=q.view(2, 4, 64), key=k.view(2, 2, 64), value=v.view(2, 2, 64), keys=keys, values=values)
    apart = c._replace(**rows, table=torch.cat([c.table, c.table], 1)[:, : c.table.shape[1]])
    ours, theirs = fresh(apart), fresh(apart)
    contract.CONTRACT.reference(*theirs)
    given = cuda.fields(apart)
    assert given["query_strides"] == (512, 64) and given["keys_strides"] == keys.stride()[:3] and given["table_stride"] == 2 * c.table.shape[1]
    coded = contract.call(CPU, (20, 33), 16, 4, 2, 64, F16, codes=2)
    assert cuda.fields(coded._replace(key_scale=torch.rand(4)[::2]))["key_scale"].is_contiguous()
    # The emulator copies tensors as contiguous ones.
    got = run(ours._replace(**{name: t.contiguous() for name, t in rows.items()}, table=ours.table.contiguous()))
    assert distance(got, theirs.out) <= contract.CONTRACT.tolerance[F16]


@needs_emulator
def test_nan_stays_in_its_sequence_and_head():
    c = contract.call(CPU, (70, 40), 16, 4, 2, 64, F16)
    c.keys[c.table[0, 1].long(), 3, 1, 5] = float("nan")
    got = run(fresh(c), (2, 4))
    assert got[0, 2:].isnan().all() and not got[0, :2].isnan().any() and not got[1].isnan().any()
    c = contract.call(CPU, (70, 40), 16, 4, 2, 64, F16)
    c.query[1, 0, 0] = float("inf")
    got = run(fresh(c), (2, 4))
    assert got[1, 0].isnan().all() and not got[1, 1:].isnan().any() and not got[0].isnan().any()


@needs_emulator
def test_early():
    """Reads before its PDL wait only what no kernel of a step writes; a call that is not early waits first."""
    for tile in ((1, 3), (2, 4)):
        for window, codes in ((None, 0), (20, 0), (20, 1)):
            check(contract.call(CPU, (1, 40, 0), 16, 4, 2, 64, F16, window=window, early=True, codes=codes), tile, constants=EARLY)
    c = contract.call(CPU, (40,), 16, 4, 2, 64, F16)
    run(fresh(c))
    with pytest.raises(EmulatorError, match="before the previous kernel has finished"):
        run(fresh(c._replace(early=True)))


@needs_emulator
def test_refused_by_the_library():
    c = contract.call(CPU, (20,), 16, 4, 2, 64, F16)
    for tile in ((-1, 0), (17, 0), (0, -1)):
        with pytest.raises(EmulatorError, match="status 1"):
            run(c, tile)
    for wrong in (dict(D=96), dict(page_size=8), dict(kv_heads=3), dict(window=-1), dict(pages=0), dict(cache_pages=0), dict(format=0)):
        kernel = emulated(cuda.LIBRARY.source, 90)
        with pytest.raises(EmulatorError, match="status 1"):
            kernel.run(params.PagedParams, cuda.fields(c) | wrong, c.out)
    c = contract.call(CPU, (20,), 16, 4, 2, 64, F16, codes=1)
    for wrong in (dict(format=-1), dict(key_scale=None), dict(value_scale=None)):
        with pytest.raises(EmulatorError, match="status 1"):
            emulated(cuda.LIBRARY_OF_FP8.source, 90).run(params.PagedParams, cuda.fields(c) | wrong, c.out)


# What cudaOccupancyMaxActiveClusters says of an H200 for clusters of 0 to 16 blocks: of one block on a multiprocessor, and of two.
ALONE = (0, 132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)
PAIRED = (0, 264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14)


@needs_emulator
def test_how_many_blocks_share_a_head():
    """The best of a sweep on an H200, 520 to 8,192 tokens: NOTES.md, "Pages by a producer warp"."""
    library = emulated(Path(__file__).parent / "cluster_blocks.cu", 90, (f"-I{csrc_dir()}",)).library

    def blocks(programs: int, slots: int = 9000, alone: tuple[int, ...] = ALONE, paired: tuple[int, ...] = PAIRED) -> int:
        of = ctypes.c_int * 17
        return library.fp4_cluster_blocks(of(*alone), of(*paired), programs, slots)

    assert [blocks(n) for n in (4, 8, 16, 24, 32, 48, 64, 80, 128, 256, 1000)] == [16, 8, 6, 8, 6, 4, 2, 2, 1, 1, 1]
    assert blocks(4, slots=2048) == 8, "clusters of 16 are worth their barriers over many tokens"
    nowhere = (0,) * 17
    assert blocks(8, alone=nowhere, paired=nowhere) == 1, "a driver that does not say"


def test_a_launch_that_is_refused(monkeypatch):
    """What the library is given, and the error that names it, the call and the switch."""
    c, seen = contract.call(CPU, (20, 33), 16, 4, 2, 64, F16), []
    monkeypatch.setattr(csrc, "library", lambda name, arch: name)
    monkeypatch.setattr(params, "call", lambda library, function, filled, device: seen.append((library, function, filled.y, filled.batch)) or len(seen) - 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    cuda.launch(c)
    with pytest.raises(KernelError, match=r"fp4_paged_attention was not launched; got cudaError 1 for query \(2, 4, 64\).*\{\"paged_attention\": 0\}"):
        cuda.launch(c)
    assert seen == [("paged_attention", "fp4_paged_attention", c.out.data_ptr(), 2)] * 2
    coded = contract.call(CPU, (20, 33), 16, 4, 2, 64, F16, codes=2)
    with pytest.raises(KernelError, match="fp4_paged_attention_fp8 was not launched"):
        cuda.launch(coded)
    assert seen[-1] == ("paged_attention_fp8", "fp4_paged_attention_fp8", coded.out.data_ptr(), 2)


def test_by_torch():
    for name, args in contract.CONTRACT.inputs(CPU):
        ours, theirs = fresh(PagedCall(*args)), fresh(PagedCall(*args))
        contract.CONTRACT.reference(*theirs)
        if ours.out.numel():
            gathered.gathered(ours)
            assert distance(ours.out, theirs.out) <= contract.CONTRACT.tolerance[ours.query.dtype], name
            assert same(ours.keys, theirs.keys) and same(ours.values, theirs.values), name


def test_which_calls_the_kernel_serves():
    def kernel(c: PagedCall, arch: int = 90, **config) -> str:
        heads, d = c.query.shape[1:]
        call = Call("paged_attention", arch, c.query.dtype, heads, d, form=cuda.paged_form(c))
        return plan(call, DispatchConfig(**config)).pick(1).kernel

    c = contract.call(CPU, (20,), 16, 4, 2, 64, BF16)
    assert kernel(c) == kernel(c, 100) == kernel(c, 120) == cuda.NAME
    assert kernel(c, 80) == kernel(c, 89) == kernel(c, 0) == "gather + attention"
    assert kernel(c, thresholds={"paged_attention": 0}) == "gather + attention"
    coded = contract.call(CPU, (20,), 16, 4, 2, 64, BF16, codes=1)
    assert kernel(coded) == kernel(coded, 120) == cuda.NAME_OF_FP8 and kernel(coded, 89) == "gather + attention"
    for other in (
        contract.call(CPU, (20,), 16, 4, 2, 80, BF16), contract.call(CPU, (20,), 16, 4, 2, 64, F32), contract.call(CPU, (20,), 24, 4, 2, 64, BF16),
        contract.call(CPU, (20,), 16, 34, 2, 64, BF16), c._replace(keys=c.keys.transpose(2, 3).contiguous().transpose(2, 3)),
        c._replace(query=torch.randn(1, 4 * 64 + 4).to(BF16)[:, 4:].view(1, 4, 64)),
    ):  # fmt: skip
        assert kernel(other) == "gather + attention"


def test_errors():
    c = contract.call(CPU, (20, 3), 16, 4, 2, 64, BF16)
    op = torch.ops.fp4.paged_attention
    for error, wrong in (
        (DTypeError, dict(query=c.query.half())), (DTypeError, dict(lengths=c.lengths.long())), (DTypeError, dict(table=c.table.long())),
        (ShapeError, dict(key=c.key[:, :1])), (ShapeError, dict(table=c.table[:1])), (ShapeError, dict(lengths=c.lengths[:1])),
        (ShapeError, dict(out=c.out[:, :2])), (ShapeError, dict(keys=c.keys[..., :32], values=c.values[..., :32])), (ConfigError, dict(window=0)),
        (ConfigError, dict(softcap=-1.0)), (ShapeError, dict(sinks=torch.zeros(3))), (DTypeError, dict(key_scale=torch.ones(1))),
        (DTypeError, dict(keys=c.keys.to(F8))), (DTypeError, dict(keys=c.keys.to(F8), values=c.values.to(F8), key_scale=torch.ones(1))),
    ):  # fmt: skip
        before = c.keys.clone()
        with pytest.raises(error, match=r"fp4.paged_attention"):
            op(*c._replace(**wrong))
        assert same(c.keys, before)
    coded = contract.call(CPU, (20, 3), 16, 4, 2, 64, BF16, codes=2)
    for error, wrong in (
        (DTypeError, dict(key_scale=coded.key_scale.half())), (DTypeError, dict(key_scale=None)), (ShapeError, dict(key_scale=torch.ones(1))),
        (ShapeError, dict(key_scale=torch.ones(3), value_scale=torch.ones(3))), (ShapeError, dict(key_scale=torch.ones(1, 2), value_scale=torch.ones(1, 2))),
    ):  # fmt: skip
        with pytest.raises(error, match=r"scales of the cache"):
            op(*coded._replace(**wrong))
