"""fp4.paged_attention on a GPU: against float64 on fresh data, what is written, replays under a CUDA graph, lengths from 1 to 70,000."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4_inductor.kernels.paged_attention import cuda
from fp4_inductor.ops import paged_attention as contract
from fp4_inductor.ops.paged_attention import PagedCall
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error

pytestmark = pytest.mark.gpu
NAN = float("nan")


def call(lengths, page=16, h=8, heads=2, d=128, dtype=BF16, **options) -> PagedCall:
    return contract.call(torch.device(DEVICE), tuple(lengths), page, h, heads, d, dtype, **options)


def fresh(c: PagedCall) -> PagedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone(), out=torch.full_like(c.out, NAN))


def same(a, b) -> bool:
    if a.dtype == contract.CODES:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def check(c: PagedCall, tile=(0, 0)) -> PagedCall:
    assert cuda.paged_form(c) == (("a cache in fp8",) if cuda.is_in_codes(c) else ())
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    contract.CONTRACT.reference(*theirs)
    cuda.launch(ours, tile)
    cuda.launch(again, tile)
    assert error(ours.out, theirs.out.double()) <= contract.CONTRACT.tolerance[c.query.dtype]
    assert same(ours.keys, theirs.keys) and same(ours.values, theirs.values) and torch.equal(again.out, ours.out)
    return ours


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", cuda.WIDTHS)
@pytest.mark.parametrize("group", [1, 4, 7, 8, 11, 16])
def test_shapes(group, d, dtype):
    for tile in ((0, 0), *itertools.product(range(1, 17), (3, 4))):
        check(call((1, 16, 17, 0, 129, 700), 16, 3 * group, 3, d, dtype), tile)
    check(call((95, 340), 48, 2 * group, 2, d, dtype, scale=0.4, early=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", cuda.WIDTHS)
@pytest.mark.parametrize("group", [1, 4, 11, 16])
def test_shapes_in_fp8(group, d, dtype):
    for tile in ((0, 0), *itertools.product(range(1, 17), (3, 7))):
        check(call((1, 16, 17, 0, 129, 700), 16, 3 * group, 3, d, dtype, codes=3), tile)
    check(call((95, 340), 48, 2 * group, 2, d, dtype, scale=0.4, early=True, codes=1))


@pytest.mark.parametrize("codes", [0, 1])
def test_lengths(codes):
    for length in (1, 2, 15, 16, 17, 127, 128, 129, 520, 1023, 4096, 8001, 70_000):
        check(call((length,), h=32, heads=8, codes=codes))
    check(call([1 + 37 * i for i in range(64)], h=32, heads=8, codes=codes))
    check(call([500] * 200, h=32, heads=8, codes=codes))


@pytest.mark.parametrize("codes", [0, 2])
def test_options(codes):
    for window, sinks, softcap in itertools.product((None, 1, 128, 1000), (False, True), (None, 2.0)):
        check(call((1, 0, 130, 2000), 16, 16, 2, 64, window=window, sinks=sinks, softcap=softcap, codes=codes))


def test_what_e4m3_cannot_hold():
    c = call((300, 300), h=8, heads=2, codes=2)
    c.key[0, 0, 3], c.value[1, 0, 7] = 60_000.0, -60_000.0
    check(c)
    c.value[1, 1, 9] = NAN
    cuda.launch(c)
    assert c.out[1, 4:, 9].isnan().all() and int(c.out.isnan().sum()) == 4


def test_vllm_stores_the_same_codes():
    """Where vLLM is there: its own append."""
    ops = pytest.importorskip("vllm._custom_ops")
    c = call((300, 17, 5), h=8, heads=2, codes=1)
    theirs = fresh(c)
    keys, values = theirs.keys.view(torch.uint8), theirs.values.view(torch.uint8)
    ops.reshape_and_cache_flash(c.key, c.value, keys, values, c.slots, "fp8", c.key_scale, c.value_scale)
    cuda.launch(c)
    assert same(c.keys, theirs.keys) and same(c.values, theirs.values)


def test_rows_of_one_product():
    """Query, key and value as vLLM gives them, rows of one tensor, and a cache of two planes; the op itself."""
    c = call((20, 333), h=32, heads=8)
    product = torch.randn(2, 48 * 128, device=DEVICE).to(BF16)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in product.split([32 * 128, 8 * 128, 8 * 128], 1))
    planes = torch.stack([c.keys, c.values])
    c = c._replace(query=q, key=k, value=v, keys=planes[0], values=planes[1])
    want = fresh(c)
    contract.CONTRACT.reference(*want)
    torch.ops.fp4.paged_attention(*c)
    assert error(c.out, want.out.double()) <= contract.CONTRACT.tolerance[BF16]
    assert same(c.keys, want.keys)


def test_heads_ahead_of_tokens():
    """A cache whose pages have all tokens of a head one behind the other; and one whose pages hold keys and values."""
    for page in (16, 48):
        c = call((20, 333, 1), page, h=32, heads=8)
        check(c._replace(**{name: getattr(c, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("keys", "values")}))
        both, want = torch.stack([c.keys, c.values], 1), fresh(c)
        contract.CONTRACT.reference(*want)
        cuda.launch(c._replace(keys=both[:, 0], values=both[:, 1]))
        assert error(c.out, want.out.double()) <= contract.CONTRACT.tolerance[BF16] and same(both[:, 0], want.keys)


def test_nan_stays_in_its_sequence_and_head():
    c = call((300, 300), h=8, heads=2)
    c.values[c.table[0, 3].long(), 2, 1, 5] = NAN
    cuda.launch(c)
    got = c.out
    assert got[0, 4:, 5].isnan().all() and not got[0, :4].isnan().any() and not got[1].isnan().any()


@pytest.mark.parametrize("codes", [0, 1])
def test_a_thousand_replays(codes):
    """The same bits, with lengths that a graph did not know when it was captured."""
    c = call((700, 64, 3), h=32, heads=8, early=True, codes=codes)
    short = torch.tensor([40, 64, 1], dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    c.slots.fill_(-1)
    with torch.cuda.stream(stream):
        torch.ops.fp4.paged_attention(*c)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            torch.ops.fp4.paged_attention(*c)
    for lengths in (c.lengths.clone(), short):
        c.lengths.copy_(lengths)
        want = fresh(c)
        contract.CONTRACT.reference(*want)
        graph.replay()
        first = c.out.clone()
        assert error(first, want.out.double()) <= contract.CONTRACT.tolerance[BF16]
        different = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(1000):
            graph.replay()
            different += (c.out != first).sum()
        assert int(different) == 0
