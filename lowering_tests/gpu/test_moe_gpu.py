"""fp4.moe on a GPU: every kernel against float64, every regime of T * k, awkward routing, CUDA graphs, streams, 2**31 bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fp4_inductor import dispatch, explain
from fp4_inductor.config import dispatch_config
from fp4_inductor.formats import sparse24
from fp4_inductor.kernels.moe import decode_table, grouped_wide, many
from fp4_inductor.kernels.select import Counts, describe, moe_op, plan
from fp4_inductor.modules import FP4Experts
from fp4_inductor.modules.experts import quantize_stack
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops import router, topk
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.norm_linear import rms_norm_reference
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, FP32, error
from lowering_tests.ops.moe_arguments import arguments, moe_call

pytestmark = pytest.mark.gpu
moe = torch.ops.fp4.moe
GPT_OSS = Activation("swiglu_oai", 1.702, 7.0, True)
BOUND = {BF16: 8e-3, FP16: 3e-3, FP32: 5e-6}
FP8_TWICE = 0.09  # gate, up and then down through E4M3: 0.082 measured, on clamped activations and on K = 16


def weight(e, n, k):
    """Bytes are drawn directly: every code, scales from 2**-2 to 2**2."""
    q = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8, device=DEVICE)
    s = torch.randint(0x28, 0x48, (e, n, k // 16), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    return q, s, torch.rand(e, device=DEVICE) * 0.3 / k**0.5 + 0.1 / k**0.5


def layer(e=16, h=256, inner=128, gated=True):
    return (*weight(e, inner * (2 if gated else 1), h), *weight(e, h, inner))


def sparse_weight(e, n, k, pattern=None):
    """As :func:`weight`, 2:4; ``pattern``: one of the six everywhere, else all mixed."""
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=DEVICE)
    index = torch.randint(0, 6, (e, n, k // 4), device=DEVICE) if pattern is None else torch.full((e, n, k // 4), pattern, device=DEVICE)
    _, scale, g = weight(e, n, k)
    return torch.randint(0, 256, (e, n, k // 4), dtype=torch.uint8, device=DEVICE), sparse24.pack_meta(nibble[index]), scale, g


def check_sparse(x, ids, w, up, down, *rest):
    bound = bound_of(x, ids.numel(), up, down)
    got, want = moe(*arguments(x, ids, w, up, down, *rest)), contract.reference(moe_call(x.float(), ids, w, up, down, *rest))
    assert error(got, want.double()) <= bound, (x.shape, ids.shape)
    return got


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_sparse_experts_by_every_number_of_tokens(dtype):
    up, down = sparse_weight(16, 256, 256), sparse_weight(16, 256, 128)
    for t in (0, 1, 2, 3, 4, 5, 17, 64, 255, 512, 2000):
        x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(dtype), routed(t, 2, 16)
        check_sparse(x, ids, w, up, down)
        check_sparse(x, ids, w, weight(16, 256, 256), down)  # one of the two is dense


@pytest.mark.parametrize("pattern", range(6))
def test_each_pattern_of_sparse_experts(pattern):
    """Activations tell the four positions of a group apart."""
    up, down = sparse_weight(16, 256, 256, pattern), sparse_weight(16, 256, 128, pattern)
    for t in (1, 4, 60, 3000):
        x = (torch.randn(t, 256, device=DEVICE) * 4.0 ** (torch.arange(256, device=DEVICE) % 4)).to(BF16)
        check_sparse(x, *routed(t, 2, 16), up, down)


@pytest.mark.parametrize("shape", [(3, 96, 160), (5, 1056, 160), (128, 2048, 768), (2, 32, 32)], ids=str)
def test_shapes_of_sparse_experts(shape):
    e, h, inner = shape
    up, down = sparse_weight(e, 2 * inner, h), sparse_weight(e, h, inner)
    biases = torch.randn(e, 2 * inner, device=DEVICE).to(BF16), torch.randn(e, h, device=DEVICE).to(BF16)
    for t in (1, 3, 70):
        x, (ids, w) = torch.randn(t, h, device=DEVICE).to(BF16), routed(t, 4, e)
        check_sparse(x, ids, w, up, down, *biases, *GPT_OSS.arguments())
        ids[:, 1] = torch.randint(-3, e + 4, (t,), device=DEVICE)
        check_sparse(x, ids, w, up, down)


@pytest.mark.parametrize("t", [1, 60, 3000])
def test_sparse_experts_in_a_cuda_graph(t):
    up, down = sparse_weight(16, 256, 256), sparse_weight(16, 256, 128)
    x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 2, 16)
    args = arguments(x, ids, w, up, down)
    want = moe(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(*args)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)


def test_illegal_metadata_of_experts_stays_inside_its_operands():
    up, down = sparse_weight(16, 256, 256), sparse_weight(16, 256, 128)
    for parts in (up, down):
        parts[1].random_(0, 256)
    for t in (1, 60, 3000):
        moe(*arguments(torch.randn(t, 256, device=DEVICE).to(BF16), *routed(t, 2, 16), up, down))
    torch.cuda.synchronize()


def routed(t, k, e):
    return torch.randint(0, e, (t, k), device=DEVICE), torch.rand(t, k, device=DEVICE)


def bound_of(x, pairs, up, down):
    sparse = (parts[1] if len(parts) == 4 else None for parts in (up, down))
    options = plan(describe(moe_op(*sparse), x.device, x.dtype, down[0].shape[1], x.shape[1], "auto", counts=Counts(up[0].shape[0])), dispatch_config())
    return FP8_TWICE if pairs and "fp8" in options.pick(pairs).kernel else BOUND[x.dtype]


def check(x, ids, w, parts, *rest):
    bound = bound_of(x, ids.numel(), parts[:3], parts[3:])
    got, want = moe(x, ids, w, *parts, *rest), contract.CONTRACT.reference(x.float(), ids, w, *parts, *rest)
    assert got.dtype == x.dtype
    assert error(got, want.double()) <= bound, (x.shape, ids.shape)
    return got


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_number_of_tokens(dtype):
    parts = layer()
    for t in (0, 1, 2, 3, 4, 5, 8, 17, 64, 255, 512, 513, 2000):
        check(torch.randn(t, 256, device=DEVICE).to(dtype), *routed(t, 2, 16), parts)


@pytest.mark.parametrize(
    "act", [Activation(), GPT_OSS, Activation("gelu"), Activation("gelu_tanh"), Activation("silu", limit=0.5), Activation("relu2")], ids=str
)
@pytest.mark.parametrize("t", [2, 40, 3000])
def test_forms(act, t):
    gated = act.name != "relu2"
    parts = layer(gated=gated)
    biases = (torch.randn(16, 256 if gated else 128, device=DEVICE).to(BF16), torch.randn(16, 256, device=DEVICE).to(BF16))
    x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 3, 16)
    check(x, ids, w, parts, None, None, *act.arguments())
    check(x, ids, w, parts, *biases, *act.arguments())
    check(x, ids, w, parts, *biases, *act.arguments(), True)


@pytest.mark.parametrize("shape", [(3, 48, 80), (5, 1040, 176), (128, 2048, 768), (2, 16, 16)], ids=str)
def test_shapes(shape):
    e, h, inner = shape
    parts = layer(e, h, inner)
    for t in (1, 3, 70):
        check(torch.randn(t, h, device=DEVICE).to(BF16), *routed(t, 4, e), parts)


@pytest.mark.parametrize("t", [3, 60, 3000])
def test_ids_that_are_no_expert(t):
    parts = layer()
    x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 3, 16)
    ids[:, 1] = torch.randint(-3, 20, (t,), device=DEVICE)
    check(x, ids, w, parts)
    table = torch.randint(-2, 18, (20,), device=DEVICE)
    check(x, ids, w, parts, None, None, *Activation().arguments(), False, table)
    assert not moe(x, torch.full_like(ids, -1), torch.full_like(w, float("nan")), *parts).any()
    check(x, torch.full_like(ids, 7), w, parts)


@pytest.mark.parametrize("t", [4, 60, 3000])
def test_what_is_not_finite_stays_in_its_token(t):
    parts = layer()
    x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 2, 16)
    clean = moe(x, ids, w, *parts)
    x[2, 5] = float("nan")
    got = moe(x, ids, w, *parts)
    others = torch.arange(t, device=DEVICE) != 2
    assert torch.equal(got[others], clean[others])
    assert not torch.isfinite(got[2]).any()


@pytest.mark.parametrize("t", [1, 8, 60, 3000])
def test_graph_replay_is_eager_and_every_run_is_the_same(t):
    parts = layer()
    x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 2, 16)
    want = moe(x, ids, w, *parts)
    assert all(torch.equal(moe(x, ids, w, *parts), want) for _ in range(100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, ids, w, *parts)
    for _ in range(100):
        x.normal_()
        ids.random_(0, 16)
        graph.replay()
        assert torch.equal(out, moe(x, ids, w, *parts))


@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)", reason="written for sm_90")
@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        *((grouped_wide.wide, grouped_wide.Tile(tokens)) for tokens in (8, 16, 32, 48, 96, 128)),
        *((grouped_wide.wide, grouped_wide.Tile(tokens, gathers=True)) for tokens in (8, 16, 32, 48, 80, 96, 128)),
        *((grouped_wide.wide_fp8, grouped_wide.Tile(tokens)) for tokens in (64, 96, 128, 192, 256)),
    ],
)
def test_every_tile_of_the_cuda_kernels(kernel, tile):
    """Tails in all sizes, experts without tokens, one with nearly all; maps; the same bits in every run. In FP8 nearly those of transient weights."""
    for e, h, inner, act in (
        (16, 512, 512, Activation()),
        (5, 256, 768, Activation("silu", 1.702, 0.5)),
        (300, 64, 64, Activation()),
        (6, 2880, 320, GPT_OSS),
        (6, 320, 2880, GPT_OSS),
    ):
        parts = layer(e, h, inner)
        biases = (torch.randn(e, 2 * inner, device=DEVICE).to(BF16), torch.randn(e, h, device=DEVICE).to(BF16)) if act == GPT_OSS else (None, None)
        for t, ids_dtype in ((1, torch.int64), (37, torch.int32), (700, torch.int64)):
            x, (ids, w) = torch.randn(t, h, device=DEVICE).to(BF16), routed(t, 3, e)
            ids, table = ids.to(ids_dtype), None
            if t == 37:
                ids[::3, 0], ids[1, 1] = -1, e
                table = torch.randint(-2, e, (e,), device=DEVICE)
            if t == 700:
                ids[:, 0] = 1
            given = moe_call(x, ids, w, parts[:3], parts[3:], *biases, *act.arguments(), False, table)
            got, bound = kernel(given, tile), BOUND[BF16] if kernel is grouped_wide.wide else FP8_TWICE
            assert error(got, contract.reference(replace(given, hidden=x.float())).double()) <= bound, (e, h, inner, t)
            assert all(torch.equal(kernel(given, tile), got) for _ in range(20))
            if kernel is grouped_wide.wide_fp8:
                assert error(got, many.large_fp8(given).double()) <= 0.03


@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)", reason="written for sm_90")
@pytest.mark.parametrize(
    ("shape", "sparse"),
    [
        *itertools.product(((8, 2, 4096, 1024), (300, 8, 512, 768), (6, 16, 256, 256)), ((), (0,), (1,), (0, 1))),
        *itertools.product(((32, 4, 2880, 2880), (5, 3, 448, 192), (40, 8, 320, 64)), ((),)),
    ],
)
def test_the_kernel_of_a_few_tokens(shape, sparse):
    """Every number of tokens of two launches and more; ids that are no expert, and the same one twice; maps; the same bits in every run and in a CUDA graph."""
    e, k, h, inner = shape
    act = GPT_OSS if h % 256 or h == 512 else Activation("silu", 1.702, 0.5) if e == 6 else Activation()
    up, down = (sparse_weight(e, *size) if i in sparse else weight(e, *size) for i, size in enumerate(((2 * inner, h), (h, inner))))
    biases = (torch.randn(e, 2 * inner, device=DEVICE).to(BF16), torch.randn(e, h, device=DEVICE).to(BF16)) if act == GPT_OSS else (None, None)
    for t in (1, 2, 3, 4, 5, 7, 8, 9, 16, 19):
        x, (ids, w) = torch.randn(t, h, device=DEVICE).to(BF16), routed(t, k, e)
        ids, table = ids.to(torch.int32 if t % 2 else torch.int64), None
        if t in (4, 9):
            ids[::3, 0], ids[1, 1], ids[2, :2] = -1, e, 1
            table = torch.randint(-2, e, (e,), device=DEVICE)
        given = moe_call(x, ids, w, up, down, *biases, *act.arguments(), False, table)
        got = decode_table.table(given)
        want = contract.reference(replace(given, hidden=x.float())).double()
        assert error(got, want) <= BOUND[BF16], t
        assert all(torch.equal(decode_table.table(given), got) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_table.table(given)
    for _ in range(100):
        graph.replay()
    assert torch.equal(out, got)


def test_another_stream_and_device_guard():
    parts = layer()
    stream = torch.cuda.Stream()
    x, (ids, w) = torch.randn(5, 256, device=DEVICE).to(BF16), routed(5, 2, 16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = moe(x, ids, w, *parts)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, moe(x, ids, w, *parts))


def test_no_synchronisation():
    parts = layer()
    for t in (2, 60, 3000):
        x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 2, 16)
        moe(x, ids, w, *parts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            moe(x, ids, w, *parts)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_kernels_agree_where_two_could_serve():
    parts = layer()
    x, (ids, w) = torch.randn(30, 256, device=DEVICE).to(BF16), routed(30, 2, 16)
    grouped = moe(x, ids, w, *parts)
    with dispatch(thresholds={"decode": 10**6, "wide": 0, "grouped": 0}):
        decode = moe(x, ids, w, *parts)
    with dispatch(thresholds={"wide": 0}):
        assert error(moe(x, ids, w, *parts), grouped.double()) < 8e-3
    with dispatch(thresholds={"decode": 0, "wide": 0, "grouped": 0}):
        dense = moe(x, ids, w, *parts, prefill="bf16")
    assert error(decode, grouped.double()) < 8e-3
    assert error(dense, grouped.double()) < 8e-3


def test_more_than_two_to_the_31_bytes_of_codes():
    e, h, inner = 130, 8192, 4096
    assert e * 2 * inner * h // 2 > 2**31
    parts = layer(e, h, inner)
    for t in (1, 40):
        ids = torch.full((t, 2), e - 1, device=DEVICE)
        ids[:, 1] = 0
        check(torch.randn(t, h, device=DEVICE).to(BF16), ids, torch.rand(t, 2, device=DEVICE), parts)


@pytest.mark.parametrize("prefill", ["fp8", "bf16"])
def test_the_transient_weights_are_bounded(monkeypatch, prefill):
    """And in parts the result is the same."""
    parts = layer(64, 2048, 1024)
    x, (ids, w) = torch.randn(4096, 2048, device=DEVICE).to(BF16), routed(4096, 2, 64)
    with dispatch(thresholds={"wide": 0, "wide_fp8": 0, "grouped": 0}):
        whole = moe(x, ids, w, *parts, prefill=prefill)
        monkeypatch.setattr(many, "TRANSIENT_BYTES", 32 << 20)
        moe(x, ids, w, *parts, prefill=prefill)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        in_parts = moe(x, ids, w, *parts, prefill=prefill)
    rows = ids.numel() * 2 * (2048 + 2 * 2048 + 1024 + 2048)  # x, the first product and a part of it, h, the second product
    assert torch.cuda.max_memory_allocated() - before < 2 * many.TRANSIENT_BYTES + rows + (16 << 20)
    assert error(in_parts, whole.double()) < 4e-3


@pytest.mark.parametrize("act", [Activation(), GPT_OSS, Activation("relu2")], ids=str)
@pytest.mark.parametrize("inner", [48, 1040, 5136, 16400])
def test_rows_of_many_tokens_of_every_width(act, inner):
    """Rows held whole and rows in steps, tails of both; experts without tokens; weights on the input; a map."""
    gated = act.name != "relu2"
    parts = layer(5, 272, inner, gated)
    biases = torch.randn(5, inner * (2 if gated else 1), device=DEVICE).to(BF16), torch.randn(5, 272, device=DEVICE).to(BF16)
    table = torch.tensor([3, -1, 0, 1], device=DEVICE)
    x, ids, w = torch.randn(700, 272, device=DEVICE).to(BF16), torch.randint(-1, 5, (700, 2), device=DEVICE), torch.rand(700, 2, device=DEVICE)
    with dispatch(thresholds={"decode": 0, "wide": 0, "grouped": 0}):
        for on_input in (False, True):
            for prefill, bound in (("auto", 0.12 if act.name == "relu2" else FP8_TWICE), ("bf16", BOUND[BF16])):  # a square doubles the first error
                args = (ids, w, *parts, *biases, *act.arguments(), on_input, table, prefill)
                assert error(moe(x, *args), contract.CONTRACT.reference(x.float(), *args).double()) <= bound


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_is_one_graph_and_equals_eager(mode):
    experts = FP4Experts(
        quantize_stack(torch.randn(16, 256, 256, device=DEVICE).to(BF16), None),
        quantize_stack(torch.randn(16, 256, 128, device=DEVICE).to(BF16), None),
        Activation(),
    )
    compiled = torch.compile(experts, fullgraph=True, mode=mode, dynamic=mode == "default")
    for t in (1, 4, 60, 700):
        x, (ids, w) = torch.randn(t, 256, device=DEVICE).to(BF16), routed(t, 2, 16)
        for _ in range(3):
            assert torch.equal(compiled(x, ids, w), experts(x, ids, w))
    assert explain(experts, x, ids, w).rows[0].op == "fp4.moe"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_topk(dtype):
    for t, e, k in ((1, 128, 8), (8, 512, 10), (4097, 128, 8), (33, 32, 4), (5, 1000, 32), (3, 8, 2), (64, 60, 1)):
        x = torch.randn(t, e, device=DEVICE).to(dtype)
        x[0, :2] = 1.0
        x[-1, 1] = float("nan")
        values, indices = torch.ops.fp4.topk(x, k)
        want, order = topk.reference(x, k)
        assert torch.equal(indices, order) and torch.equal(values.nan_to_num(9.0), want.nan_to_num(9.0)), (t, e, k)
        torch.testing.assert_close(values, torch.topk(x, k).values, rtol=0, atol=0, equal_nan=True)


ROUTED = (  # tokens, H, experts, k, with a bias
    (1, 2048, 128, 8, False), (8, 2048, 512, 10, False), (3, 2880, 32, 4, True), (9, 4096, 8, 2, False), (700, 96, 60, 6, True),
    (8, 2048, 128, 8, False), (13, 2880, 32, 4, True), (64, 6144, 100, 8, False),
)  # fmt: skip


def operands(t, h, e, biased, dtype):
    x, weight = torch.randn(t, h, device=DEVICE).to(dtype), (torch.randn(e, h, device=DEVICE) / h**0.5).to(dtype)
    return x, weight, torch.randn(e, device=DEVICE).to(dtype) if biased else None


def check_choice(x, weight, bias, k, form, weights, ids):
    """An order of sums may move a score by a rounding: the choice is compared by what it is worth, and its weights by the ids it gave."""
    scores = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    best = scores.topk(k).values
    torch.testing.assert_close(scores.gather(1, ids), best, rtol=0, atol=0.04 if x.dtype == BF16 else 0.005)
    assert all(len(set(row)) == k for row in ids.tolist()) and int(ids.min()) >= 0 and int(ids.max()) < len(weight)
    p = scores.gather(1, ids).softmax(-1) if form == "chosen" else scores.softmax(-1).gather(1, ids)
    p = p / p.sum(-1, keepdim=True) if form == "normalized" else p
    assert error(weights, p) < (8e-3 if x.dtype == BF16 else 1e-3), x.shape


@pytest.mark.parametrize("form", router.FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_router(dtype, form):
    for t, h, e, k, biased in ROUTED:
        x, weight, bias = operands(t, h, e, biased, dtype)
        weights, ids = torch.ops.fp4.router(x, weight, bias, k, form, torch.float32)
        check_choice(x, weight, bias, k, form, weights, ids)
        torch.testing.assert_close(torch.ops.fp4.router(x, weight, bias, k, form, dtype, True)[0], weights.to(dtype), rtol=0, atol=0)
        x[0, 5] = float("nan")
        weights, ids = torch.ops.fp4.router(x, weight, bias, k, form, torch.float32)
        assert weights[0].isnan().all() and len(set(ids[0].tolist())) == k and int(ids.min()) >= 0 and int(ids.max()) < e and not weights[1:].isnan().any()


@pytest.mark.parametrize("form", router.FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norm_router(dtype, form):
    """By one launch of 8 to 64 tokens, elsewhere in steps."""
    for t, h, e, k, biased in ROUTED:
        x, weight, bias = operands(t, h, e, biased, dtype)
        norm, eps, offset = torch.rand(h, device=DEVICE).to(dtype), 1e-5, float(t % 2)
        normed, weights, ids = torch.ops.fp4.norm_router(x * 7, norm, eps, offset, weight, bias, k, form, torch.float32, True)
        assert error(normed, rms_norm_reference(x * 7, norm, eps, offset).double()) < (4e-3 if dtype == BF16 else 5e-4)
        check_choice(normed, weight, bias, k, form, weights, ids)
