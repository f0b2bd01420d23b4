"""fp4.cached_attention in one launch over a cache in 8 or 4 bits, on a GPU: against float64, what is written, replays, and a step of a model over a KVCache."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, explain
from fp4_inductor.formats import kv
from fp4_inductor.kernels import select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS, cache_in
from fp4_inductor.kernels.cached_attention import cuda, quantized
from fp4_inductor.kernels.cached_attention.step import StepConfig
from fp4_inductor.lowerings import cached_attention as lowering
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall, Prologue, Stored
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error
from lowering_tests.gpu.test_attention_step_gpu import check_replays

pytestmark = pytest.mark.gpu
NAN = float("nan")
FORMATS = tuple(kv.FORMATS)
TRITON, CUDA = "triton_quantized_attention", "cuda_quantized_attention"
KERNELS = (CUDA, TRITON)
OFF: dict[str, dict[str, int]] = {CUDA: {"step_attention": 0}, TRITON: {"step_attention": 0, "cuda_attention": 0}}  # so that it serves the call
PROLOGUE = 2  # keys and queries are rounded once more often than in the reference


def cache_of(name, b, heads, s, d, at, window, dtype, rollback):
    """What it holds after ``at`` random tokens; NaN where none was written."""
    f = kv.FORMATS[name]
    held = torch.arange(max(0, at - s), at, device=DEVICE)
    old = [torch.randn(b, heads, len(held), d, device=DEVICE).to(dtype) for _ in range(2)]
    mean = torch.randn(b, heads, d, device=DEVICE)
    rows = [kv.empty(kind, (b, heads, s), d, torch.device(DEVICE)) for kind in (f.key, f.value)]
    for row, tokens, kind, shift in zip(rows, old, (f.key, f.value), (mean, None), strict=True):
        row.scale.fill_(NAN)
        for cache, new in zip(row, kv.quantize(tokens, kind, shift), strict=True):
            if cache is not None:
                (cache.view(torch.uint8) if cache.itemsize == 1 else cache)[:, :, held % s] = new.view(torch.uint8) if new.itemsize == 1 else new
    exact = [None, None]
    if f.exact:
        slots = kv.exact_slots(s + 60 if window else s, rollback)
        where = kv.exact_position(torch.tensor(at - 1, device=DEVICE), slots)
        exact = [torch.full((b, heads, slots, d), NAN, device=DEVICE, dtype=dtype) for _ in range(2)]
        for cache, tokens in zip(exact, old, strict=True):
            cache[:, :, where >= 0] = 0.5
            here = where >= max(0, at - s)
            cache[:, :, here] = tokens[:, :, where[here] - max(0, at - s)]
    return rows[0].codes, rows[1].codes, Stored(rows[0].scale, rows[1].scale, mean, rows[1].blocks, rows[0].blocks, *exact)


def call(name, b, h, heads, q, s, d, at, window=None, dtype=BF16, prologue=False, sinks=False, padded=False, rollback=16, **options) -> CachedCall:
    product = torch.randn(b, q, (h + 2 * heads) * d, device=DEVICE).to(dtype)
    query, key, value = (part.unflatten(2, (-1, d)).transpose(1, 2) for part in product.split([h * d, heads * d, heads * d], 2))
    keys, values, stored = cache_of(name, b, heads, s, d, at, window, dtype, rollback)
    last = None
    if prologue:
        norms = [torch.randn(d, device=DEVICE).to(dtype) for _ in range(2)]
        angles = torch.rand(1, q, d, device=DEVICE) * 6
        last = Prologue(*norms, 1e-6, 0.0, angles.cos().to(dtype), angles.sin().to(dtype), d)
    mask = (torch.arange(at + q + 5, device=DEVICE) >= torch.arange(b, device=DEVICE)[:, None] * 3)[:, None, None] if padded else None
    counters = torch.zeros(b * heads, dtype=torch.int32, device=DEVICE)
    sink = torch.randn(h, device=DEVICE).to(dtype) if sinks else None
    position = torch.tensor(at, device=DEVICE)
    return CachedCall(query, key, value, keys, values, position, mask, window=window, sinks=sink, arrivals=counters, prologue=last, stored=stored, **options)


def fresh(c: CachedCall) -> CachedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone(), stored=Stored(*(None if t is None else t.clone() for t in c.stored)))


def op(c: CachedCall, kernel: str = CUDA):
    with fp4_inductor.dispatch(thresholds=OFF[kernel]):
        return torch.ops.fp4.cached_attention(*c.flat())


def numbers(c: CachedCall) -> list[torch.Tensor]:
    dense = [kv.dequantize(r, kind, mean) for r, kind, mean in zip(c.rows(), (c.format.key, c.format.value), (c.stored.key_mean, None), strict=True)]
    return [t.float() for t in (*dense, c.stored.exact_keys, c.stored.exact_values) if t is not None]


def check(c: CachedCall, kernel: str = CUDA, run=None):
    """``run``: in place of a call of the op that ``kernel`` serves."""
    assert set(select.cached_form(c)).difference(NOT_BY_CLUSTERS) == {cache_in(c.format.name)}
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    watched = mock.patch.object(cuda, "fields", wraps=cuda.fields) if kernel == CUDA else mock.patch.object(quantized, "tile_of", wraps=quantized.tile_of)
    with watched as asked:
        got = run(ours) if run else op(ours, kernel)
        assert run or asked.called, "another kernel ran"
    bound = contract.CONTRACT.tolerance[c.query.dtype] * (PROLOGUE if c.prologue else 1)
    assert error(got, want.double()) <= bound, (error(got, want.double()), bound)
    for a, b in zip(numbers(ours), numbers(theirs), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), "only the new tokens' slots are written"
        # A sum in another order may put a tie on the other side; after norm and rotation in float32 more of them.
        assert error(a.nan_to_num(0.0), b.nan_to_num(0.0).double()) <= (2e-2 if c.prologue else 1e-4)
    assert not c.arrivals.any(), "counters are zero again"
    assert torch.equal(run(again) if run else op(again, kernel), got)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(numbers(ours), numbers(again), strict=True))


SHAPES = [
    # (B, H, Hkv, Q, S, D, position, window)
    (1, 32, 8, 1, 520, 128, 519, None), (1, 32, 8, 1, 520, 128, 0, None), (1, 32, 8, 1, 4104, 128, 520, None), (8, 32, 8, 1, 520, 128, 66, None),
    (1, 32, 8, 4, 1027, 128, 1000, None), (3, 8, 1, 2, 300, 64, 257, None), (1, 8, 8, 8, 200, 80, 33, None), (2, 8, 4, 1, 700, 256, 650, None),
    (1, 64, 8, 1, 256, 64, 5000, 128), (2, 8, 4, 5, 132, 128, 777, 128), (1, 28, 4, 1, 20000, 128, 19998, None),
]  # fmt: skip
OPTIONS = [{}, dict(prologue=True), dict(softcap=3.0, sinks=True), dict(padded=True)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_and_options_against_float64(kernel, shape, name):
    if kernel == CUDA and shape[5] not in cuda.WIDTHS:
        return
    for options in OPTIONS:
        check(call(name, *shape, **options), kernel)
    check(call(name, *shape, dtype=FP16), kernel)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tile", [StepConfig(b, n, 32, w, s) for b, n, w, s in itertools.product((32, 64, 128), (1, 3, 16), (4, 8), (2, 3))], ids=str)
def test_every_tile(tile, name):
    """Requested early or not, in any number of parts: positions at the edges of tiles, of parts and of the exact tokens."""
    for at, early in itertools.product((0, 1, 63, 68, 400, 776), (False, True)):
        c = call(name, 2, 32, 8, 1, 777, 128, at, prologue=True, early=early)
        torch.cuda.synchronize()
        check(c, TRITON, lambda c: (torch.cuda.synchronize(), quantized.quantized(c, tile))[1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 32])
def test_any_number_of_parts(parts, name):
    for at, early in itertools.product((0, 1, 63, 68, 127, 128, 129, 400, 776), (False, True)):
        c = call(name, 2, 32, 8, 1, 777, 128, at, prologue=True, early=early)
        torch.cuda.synchronize()
        check(c, CUDA, lambda c: (torch.cuda.synchronize(), cuda.quantized(c, parts))[1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_thousand_replays_have_the_same_bits(name):
    check_replays([call(name, 1, 32, 8, 1, 2048, 128, 700, prologue=True) for _ in range(12)], op)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_one_after_the_other(name):
    """From an empty cache, as torch's operators do it: the mean is the first token's, the exact ring turns, parts come."""
    c = call(name, 2, 32, 8, 1, 400, 128, 0)
    ours, theirs = fresh(c), fresh(c)._replace(arrivals=None)
    ours, theirs = (x._replace(position=torch.zeros_like(c.position)) for x in (ours, theirs))
    for at in range(400):
        c.query.normal_(), c.key.normal_(), c.value.normal_()  # the arguments of both
        got, want = op(ours), torch.ops.fp4.cached_attention(*theirs.flat())
        ours.position.add_(1), theirs.position.add_(1)
        assert error(got, want.double()) <= 3 * contract.CONTRACT.tolerance[BF16], at


SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_hidden_layers=3)


@pytest.mark.parametrize("early", [0, 2])  # sequences
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_a_compiled_step(kernel, name, early, monkeypatch):
    """One launch a layer, with norm and rotation in it; logits as those of eager code over a cache of the same format, fed the same tokens."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(lowering, "EARLY", early)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)  # the key of a cached graph has no EARLY
    torch._dynamo.reset()
    reset_matches()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES, max_position_embeddings=1024)).to(DEVICE, BF16).eval()
    fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    ids = torch.randint(0, 512, (2, 90), device=DEVICE)
    ours, theirs = KVCache(model, 128, 2, kv=name), KVCache(model, 128, 2, kv=name)
    for cache in (ours, theirs):
        model(ids, past_key_values=cache)
    with fp4_inductor.dispatch(thresholds=OFF[kernel]):
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for i in range(20):
            token = (ids[:, i : i + 1] + 7) % 512
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(token, past_key_values=ours).logits.float().clone()
            with fp4_inductor.dispatch(thresholds={"step_attention": 0, "cuda_attention": 0, "attention": 0}):
                want = model(token, past_key_values=theirs).logits.float()
            assert error(got, want.double()) <= 0.04, i
        assert matches()["rope_attention"] == 3
        assert int(ours.get_seq_length()) == 110 and not ours.counter.arrivals.any()
        told = explain(compiled, input_ids=ids[:, :1], past_key_values=ours)
    assert [row.kernel for row in told.rows if row.op == "fp4.cached_attention"] == [kernel] * 3
