"""fp4.cached_attention in one launch on a GPU: against float64 on fresh data, counters and replays, and a whole step of a Transformers model over a KVCache."""

from __future__ import annotations

import itertools

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, explain
from fp4_inductor.kernels import select
from fp4_inductor.kernels.asked import NOT_BY_CLUSTERS
from fp4_inductor.kernels.cached_attention.step import StepConfig, step
from fp4_inductor.lowerings import cached_attention as lowering
from fp4_inductor.ops import cached_attention as contract
from fp4_inductor.ops.cached_call import CachedCall, Prologue
from fp4_inductor.passes import matches, reset_matches
from fp4_inductor.passes.missed import BEFORE_ATTENTION
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, FP32, error

pytestmark = pytest.mark.gpu
NAN = float("nan")
# Keys are rounded to the cache's dtype after norm and rotation in float32; the reference rounds once from float64: a rare code is the next one.
PROLOGUE = 2


def call(b, h, kv, q, s, d, at, window=None, dtype=BF16, prologue="", sinks=False, padded=False, **options) -> CachedCall:
    """The new tokens are parts of one product, as behind q/k/v siblings; the cache holds NaN where no token was written."""
    product = torch.randn(b, q, (h + 2 * kv) * d, device=DEVICE).to(dtype)
    query, key, value = (part.unflatten(2, (-1, d)).transpose(1, 2) for part in product.split([h * d, kv * d, kv * d], 2))
    keys, values = torch.full((2, b, kv, s, d), NAN, device=DEVICE, dtype=dtype)
    held = torch.arange(max(0, at - s), at, device=DEVICE) % s
    for cache in (keys, values):
        cache[:, :, held] = torch.randn(b, kv, len(held), d, device=DEVICE).to(dtype)
    last = None
    if prologue:
        norms = [torch.randn(d, device=DEVICE).to(dtype) if "norm" in prologue else None for _ in range(2)]
        r = d // 2 if "partial" in prologue else d
        angles = torch.rand(b if "each" in prologue else 1, q, r // 2 if "half" in prologue else r, device=DEVICE) * 6
        last = Prologue(*norms, 1e-6, float("half" in prologue), angles.cos().to(dtype), angles.sin().to(dtype), r)
    mask = None
    if padded:
        mask = (torch.arange(at + q + 5, device=DEVICE) >= torch.arange(b, device=DEVICE)[:, None] * 3)[:, None, None]
    counters = torch.zeros(b * kv, dtype=torch.int32, device=DEVICE)
    sink = torch.randn(h, device=DEVICE).to(dtype) if sinks else None
    position = torch.tensor(at, device=DEVICE)
    return CachedCall(query, key, value, keys, values, position, mask, window=window, sinks=sink, arrivals=counters, prologue=last, **options)


def fresh(c: CachedCall) -> CachedCall:
    return c._replace(keys=c.keys.clone(), values=c.values.clone())


def op(c: CachedCall):
    with fp4_inductor.dispatch(thresholds={"step_attention": 0}):
        return torch.ops.fp4.cached_attention(*c.flat())


def check(c: CachedCall, run=op):
    assert set(select.cached_form(c)) <= set(NOT_BY_CLUSTERS)
    ours, again, theirs = fresh(c), fresh(c), fresh(c)
    want = contract.CONTRACT.reference(*theirs.flat())
    got = run(ours)
    bound = contract.CONTRACT.tolerance[c.query.dtype] * (PROLOGUE if c.prologue else 1)
    assert error(got, want.double()) <= bound, (error(got, want.double()), bound)
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert torch.equal(a.isnan(), b.isnan()), "only the new tokens' slots are written"
        assert error(a.nan_to_num(0.0), b.nan_to_num(0.0).double()) <= (4e-3 if c.prologue else 0.0)
    assert not c.arrivals.any(), "counters are zero again"
    assert torch.equal(run(again), got) and not c.arrivals.any()
    return got


SHAPES = [
    # (B, H, Hkv, Q, S, D, position, window)
    (1, 32, 8, 1, 520, 128, 519, None), (1, 32, 8, 1, 520, 128, 0, None), (1, 32, 8, 1, 4104, 128, 520, None), (8, 32, 8, 1, 520, 128, 64, None),
    (32, 32, 8, 1, 520, 128, 300, None), (1, 32, 8, 4, 1027, 128, 1000, None), (3, 8, 1, 2, 300, 64, 257, None), (2, 16, 1, 1, 700, 64, 31, None),
    (1, 8, 8, 8, 200, 80, 33, None), (2, 8, 4, 1, 700, 256, 650, None), (1, 16, 8, 3, 100, 96, 97, None), (1, 64, 8, 1, 300, 64, 1, None),
    (1, 64, 8, 1, 256, 64, 100, 128), (1, 64, 8, 1, 256, 64, 5000, 128), (2, 8, 4, 5, 132, 128, 777, 128), (1, 8, 4, 1, 1024, 256, 2048, 1024),
    (1, 28, 4, 1, 20000, 128, 19998, None),
]  # fmt: skip
OPTIONS = [
    {}, dict(prologue="norm"), dict(prologue="half partial each"), dict(prologue="norm partial", sinks=True), dict(softcap=3.0, sinks=True), dict(padded=True),
    dict(padded=True, prologue="norm half each", softcap=2.0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_options_against_float64(shape, dtype):
    for options in OPTIONS if dtype == BF16 else OPTIONS[1:2]:
        check(call(*shape, dtype=dtype, **options))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tile", [StepConfig(b, n, least, w) for b, n, least, w in itertools.product((32, 64), (1, 3, 16, 33), (16, 64), (4, 8))], ids=str)
def test_every_tile(tile, early):
    """Requested early or not, in any number of parts: positions at the edges of tiles and parts. ``early`` is safe here: nothing runs before it."""
    for at in (0, 1, 16, 63, 64, 400, 776):
        c = call(2, 32, 8, 1, 777, 128, at, prologue="norm", early=early)
        torch.cuda.synchronize()
        check(c, lambda c: (torch.cuda.synchronize(), step(c, tile))[1])


def test_a_call_that_is_not_served_is_right_too():
    for c in (call(1, 4, 2, 1, 50, 64, 20, dtype=FP32), call(1, 64, 4, 2, 50, 64, 20), call(1, 4, 2, 1, 50, 64, 20)._replace(arrivals=None)):
        theirs = fresh(c)
        want = contract.CONTRACT.reference(*theirs[:-1])
        assert error(op(c), want.double()) <= contract.CONTRACT.tolerance[c.query.dtype]


def test_no_room():
    """Nothing is written, the result is NaN."""
    c = call(1, 32, 8, 2, 64, 128, 40)._replace(position=torch.tensor(63, device=DEVICE))
    before = c.keys.clone()
    assert op(c).isnan().all() and torch.equal(c.keys.nan_to_num(7.0), before.nan_to_num(7.0))


def test_it_is_one_launch_and_copies_nothing():
    from torch.profiler import ProfilerActivity, profile

    c = call(1, 32, 8, 1, 520, 128, 400, prologue="norm")
    op(c)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        op(c)
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["cached_attention_step"], kernels


def check_replays(calls: list[CachedCall], run) -> None:
    """``run`` of each of ``calls``, which share one counter, in a graph that is replayed a thousand times."""
    counters = calls[0].arrivals
    calls = [c._replace(arrivals=counters) for c in calls]
    want = [run(c).clone() for c in calls]  # a second call writes the same tokens to the same slots
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(c) for c in calls]
    for _ in range(1000):
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))
    assert not counters.any()


@pytest.mark.parametrize("shape", [(1, 32, 8, 1, 2048, 128, 700, None), (8, 64, 8, 1, 256, 64, 700, 128)], ids=str)
def test_a_thousand_replays_have_the_same_bits(shape):
    """Of many calls in a graph, so that programs of neighbouring launches overlap; each must find the counters at zero, and leave them so."""
    check_replays([call(*shape, prologue="norm", sinks=True) for _ in range(12)], op)


def test_replays_go_on_with_the_counter():
    """One graph from the first token to the last, through every number of parts: as eager calls in several launches, to the rounding."""
    c = call(2, 32, 8, 1, 600, 128, 0, prologue="norm each")
    ours, theirs = fresh(c), fresh(c)._replace(arrivals=None)
    op(fresh(c))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(ours)
        ours.position.add_(1)
    ours.position.zero_()
    theirs = theirs._replace(position=torch.zeros_like(c.position))
    for at in range(600):
        c.query.normal_(), c.key.normal_(), c.value.normal_()  # the arguments of both
        graph.replay()
        want = op(theirs)
        theirs.position.add_(1)
        assert error(out, want.double()) <= 2 * contract.CONTRACT.tolerance[BF16], at
    assert not ours.arrivals.any() and bool(ours.keys.isfinite().all())


# --- a model ------------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_hidden_layers=3)


def tiny(name, **changed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | changed, max_position_embeddings=1024)
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE, BF16).eval()
    return fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)


LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
FAMILIES = [("Qwen3", {}), ("Llama", {}), ("Mistral", dict(sliding_window=24)), ("Gemma3Text", dict(sliding_window=24, layer_types=LAYERS))]


@pytest.mark.parametrize("early", [0, 2])  # sequences
@pytest.mark.parametrize("kernel", ["triton_cached_attention", "cuda_step_attention"])
@pytest.mark.parametrize(("name", "changed"), FAMILIES)
@torch.no_grad()
def test_a_compiled_step(name, changed, kernel, early, monkeypatch):
    """One launch a layer, with norm and rotation in it; logits as those of eager code, which norms and rotates apart, fed the same tokens."""
    monkeypatch.setattr(lowering, "EARLY", early)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)  # the key of a cached graph has no EARLY
    torch._dynamo.reset()
    reset_matches()
    model = tiny(name, **changed)
    ids = torch.randint(0, 512, (2, 40), device=DEVICE)
    ours, theirs = KVCache(model, 128, 2), KVCache(model, 128, 2)
    for cache in (ours, theirs):
        model(ids, past_key_values=cache)
    monkeypatch.setattr(select, "suits_clusters", lambda *of: kernel == "cuda_step_attention")
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for i in range(20):
        token = (ids[:, i : i + 1] + 7) % 512
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(token, past_key_values=ours).logits.float().clone()
        want = model(token, past_key_values=theirs).logits.float()
        assert error(got, want.double()) <= 0.03, i
    assert matches()["rope_attention"] == 3
    assert int(ours.get_seq_length()) == 60 and not ours.counter.arrivals.any()
    told = explain(compiled, input_ids=ids[:, :1], past_key_values=ours)
    assert [row.kernel for row in told.rows if row.op == "fp4.cached_attention"] == [kernel] * 3
    assert not [m for m in told.missed if m.what == BEFORE_ATTENTION]
