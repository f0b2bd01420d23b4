"""Prompts over a cache in 8 and 4 bits on a GPU: what is appended and read, attention against float64, CUDA graphs, a model over a KVCache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config
from fp4_inductor.formats import kv
from fp4_inductor.kernels import host
from fp4_inductor.kernels.cached_attention import composed, prefill
from fp4_inductor.kernels.cached_attention.prefill import PrefillConfig
from fp4_inductor.ops import append_kv, cached_attention, dequantize_kv
from fp4_inductor.ops.cached_call import CachedCall
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error
from lowering_tests.gpu.test_quantized_attention_gpu import SIZES, call, fresh, numbers

pytestmark = pytest.mark.gpu
FORMATS = tuple(kv.FORMATS)
NAME = "triton_prefill_attention"
CHOSEN = dict(candidates=(NAME,)) if any(on.off for on in prefill.KERNELS[0].on) else {}


def dense_call(b, h, heads, q, s, d, at, window=None, dtype=BF16, sinks=False, padded=False, **options) -> CachedCall:
    """As ``call``, of a cache in the dtype of the query."""
    c = call("fp8", b, h, heads, q, s, d, at, window, dtype=dtype, sinks=sinks, padded=padded, **options)
    keys, values = torch.full((2, b, heads, s, d), float("nan"), device=DEVICE, dtype=dtype)
    held = torch.arange(max(0, at - s), at, device=DEVICE) % s
    keys[:, :, held], values[:, :, held] = torch.randn(2, b, heads, len(held), d, device=DEVICE).to(dtype)
    return c._replace(keys=keys, values=values, stored=None)


def make(name, *shape, **options) -> CachedCall:
    return dense_call(*shape, **options) if name == kv.DENSE else call(name, *shape, **options)


def copied(c: CachedCall) -> CachedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone()) if c.stored is None else fresh(c)


def held(c: CachedCall) -> list[torch.Tensor]:
    return [c.keys, c.values] if c.stored is None else numbers(c)


def check(c: CachedCall, run=None, times=1.0):
    ours, theirs = copied(c), copied(c)
    want = cached_attention.CONTRACT.reference(*theirs.flat())
    with fp4_inductor.dispatch(**CHOSEN), mock.patch.object(prefill, "attend", wraps=prefill.attend) as asked:
        got = run(ours) if run else torch.ops.fp4.cached_attention(*ours.flat())
        assert asked.called, "another kernel ran"
    bound = times * cached_attention.CONTRACT.tolerance[c.query.dtype]
    assert error(got, want.double()) <= bound, (error(got, want.double()), bound)
    for a, b in zip(held(ours), held(theirs), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), "only the new tokens' slots are written"
        # The errors of both scales of a block may be a tie in one order of their sum: few blocks are rounded otherwise, equally well.
        assert error(a.nan_to_num(0.0).float(), b.nan_to_num(0.0).double()) <= 4e-3


# --- append and dequantize --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 300, 520, 128, 0, None), (2, 77, 520, 64, 200, None), (1, 600, 192, 128, 777, 128), (1, 45, 50, 256, 0, None)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_appended_tokens_have_the_bits_of_the_formats(name, shape):
    b, q, s, d, at, window = shape
    c = call(name, b, 4, 4, q, s, d, at, window)
    ours, theirs = fresh(c), fresh(c)
    returned = torch.ops.fp4.append_kv(*append_kv.AppendCall.flat_of(ours))
    with mock.patch.object(kv, "mean_of", return_value=ours.stored.key_mean):  # which is summed in another order
        want = append_kv.CONTRACT.reference(*append_kv.AppendCall.flat_of(theirs))
    parts = [(x, y) for x, y in zip((ours.keys, ours.values, *ours.stored), (theirs.keys, theirs.values, *theirs.stored), strict=True) if x is not None]
    for x, y in [*parts, *zip(returned, want, strict=True)]:
        different = (x.view(torch.uint8) != y.view(torch.uint8)).float().mean().item()
        assert different <= 1e-4, "the errors of two scales of a block may be a tie in one order of their sum"
    if at == 0:
        assert error(ours.stored.key_mean, kv.mean_of(c.key).double()) <= 1e-6


@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_slots_have_the_bits_of_the_formats(name, d):
    c = call(name, 2, 4, 2, 1, 333, d, 333)
    s = c.stored
    for dtype, slots in itertools.product((torch.float32, BF16, FP16), (None, 100)):
        rest = [t for t in (s.value_blocks, s.key_blocks) if t is not None]
        args = (c.keys, c.values, s.key_scale, s.value_scale, s.key_mean, dtype, slots, *rest)
        for got, want in zip(torch.ops.fp4.dequantize_kv(*args), dequantize_kv.CONTRACT.reference(*args), strict=True):
            assert torch.equal(got, want)


# --- attention --------------------------------------------------------------------------------------------------

SHAPES = [
    # (B, H, Hkv, Q, S, D, position, window): empty, a chunk, a few queries, one that fills the cache, rings
    (1, 32, 8, 520, 600, 128, 0, None), (2, 32, 8, 130, 900, 128, 333, None), (1, 32, 8, 5, 4200, 128, 4001, None), (1, 8, 2, 300, 700, 64, 400, None),
    (1, 8, 4, 200, 600, 256, 300, None), (2, 6, 2, 100, 300, 80, 7, None), (1, 8, 8, 50, 100, 128, 50, None), (2, 64, 8, 400, 256, 64, 5000, 128),
    (1, 8, 4, 60, 260, 128, 777, 200),
    # few queries behind many tokens, whose keys are shared by several programs
    (1, 32, 8, 16, 8300, 128, 8200, None), (1, 32, 8, 64, 8300, 128, 8192, None), (1, 8, 8, 33, 3000, 128, 2900, None), (2, 14, 2, 40, 2300, 64, 9000, 2000),
    (1, 16, 4, 20, 3000, 256, 2100, None),
]  # fmt: skip
OPTIONS = [{}, dict(softcap=3.0, sinks=True), dict(padded=True)]


@pytest.mark.parametrize("name", [kv.DENSE, *FORMATS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_against_float64(shape, name):
    for options in OPTIONS:
        check(make(name, *shape, **options))
    check(make(name, *shape, dtype=FP16), times=2.0)


@pytest.mark.parametrize("name", [kv.DENSE, *FORMATS])
def test_a_cache_that_is_known_to_be_empty(name):
    """By the kernel, and by torch's attention around one launch that rounds and appends."""
    c = make(name, 2, 32, 8, 700, 800, 128, 0, empty=True)
    check(c, prefill.prefill)
    if name in FORMATS:
        ours, theirs = fresh(c), fresh(c)
        want = cached_attention.CONTRACT.reference(*theirs.flat())
        got = composed.apart(ours)
        assert error(got, want.double()) <= cached_attention.CONTRACT.tolerance[BF16]
        assert all(error(a.nan_to_num(0.0), b.nan_to_num(0.0).double()) <= 4e-3 for a, b in zip(numbers(ours), numbers(theirs), strict=True))


@pytest.mark.parametrize("tile", [PrefillConfig(m, n, w, s) for m, n, w, s in itertools.product((32, 64, 128), (32, 64), (4, 8), (2, 3))], ids=str)
@pytest.mark.parametrize("name", [kv.DENSE, "nvfp4"])
def test_every_tile(name, tile):
    for at in (0, 63, 201):
        check(make(name, 1, 8, 2, 333, 600, 128, at), lambda c: prefill.prefill(c, tile))
    divided = replace(tile, packed=True, parts=5)
    check(make(name, 1, 14, 2, 50, 1600, 128, 1500), lambda c: prefill.prefill(c, divided))


@pytest.mark.parametrize("name", [kv.DENSE, *FORMATS])
def test_few_queries_behind_many_tokens(name):
    """The keys are divided; every run gives the same bits, whatever was in memory; beyond the end of the cache rows are NaN."""
    c = make(name, 1, 32, 8, 24, 8300, 128, 8200)
    t = prefill.config_of(c, c.slots, name == "nvfp4", host.arch(c.query.device), host.processors(c.query.device))
    assert t.packed and t.parts > 1
    results = []
    for i in range(20):
        left = torch.full((32 << 20,), (float("nan"), 1e30, 0.0)[i % 3], device=DEVICE)  # in what the call will take for partial results
        del left
        results.append(torch.ops.fp4.cached_attention(*copied(c).flat()))
    assert all(torch.equal(r, results[0]) for r in results)
    if name != kv.DENSE:  # whose tokens torch copies, and asserts on the device that there is room
        full = c._replace(position=torch.full((), 8290, device=DEVICE))
        assert torch.ops.fp4.cached_attention(*copied(full).flat()).isnan().all()


def test_a_chunk_in_a_cuda_graph():
    """The counter alone says where the chunk lies."""
    c = call("nvfp4", 1, 8, 2, 100, 900, 128, 200)
    ours, theirs = (fresh(c)._replace(position=c.position.clone()) for _ in range(2))
    with fp4_inductor.dispatch(**CHOSEN):
        torch.ops.fp4.cached_attention(*fresh(c).flat())  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch.ops.fp4.cached_attention(*ours.flat())
        for _ in range(5):
            for t in (c.query, c.key, c.value):  # the arguments of both
                t.normal_()
            graph.replay()
            want = torch.ops.fp4.cached_attention(*theirs.flat())
            assert torch.equal(out, want)
            ours.position.add_(100), theirs.position.add_(100)


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_model_that_is_fed_in_chunks(name):
    """Logits as by torch's operators."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES, max_position_embeddings=1024)).to(DEVICE, BF16).eval()
    fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    ids = torch.randint(0, 512, (2, 600), device=DEVICE)
    ours, theirs = KVCache(model, 640, 2, kv=name), KVCache(model, 640, 2, kv=name)
    for begin, end in ((0, 300), (300, 430), (430, 600)):
        with fp4_inductor.dispatch(**CHOSEN):
            got = model(ids[:, begin:end], past_key_values=ours).logits.float()
        with fp4_inductor.dispatch(thresholds={"prefill_attention": 0}):
            want = model(ids[:, begin:end], past_key_values=theirs).logits.float()
        assert error(got, want.double()) <= 0.05, begin  # bfloat16 sums in another order; what a chunk does not see makes it 0.3 and more
