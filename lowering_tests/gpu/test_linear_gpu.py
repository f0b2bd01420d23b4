"""fp4.linear on a GPU, eager: numbers in every regime and dtype, awkward memory, streams, CUDA graphs, more than 2**31 elements."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fp4_inductor import FP4Linear, NVFP4Tensor, dispatch
from fp4_inductor.errors import FP4Error
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import linear_glu, quantize_glu_rows_fp8
from lowering_tests.gpu.helpers import BF16, DEVICE, FP8_BOUND, FP16, FP32, bound_of, error, exact, one_m_per_regime, plan_of, weight

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4

SWEEP = (*range(65), 100, 128, 255, 256, 257, 300, 1000, 4096)


def test_every_m():
    w, bias = weight(512, 1024), torch.randn(512, device=DEVICE).to(BF16)
    for m in SWEEP:
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        y = fp4.linear(x, *w, bias)
        assert y.shape == (m, 512)
        assert error(y, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), m


# off-tile N; K a multiple of 16 only; N one; K one block
@pytest.mark.parametrize("shape", [(33, 80), (4095, 1040), (1, 64), (130, 16), (520, 2064)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_tails(shape, dtype):
    w = weight(*shape)
    for m in {FP32: (1, 33), FP16: (1, 3, 17, 300)}.get(dtype, (1, 2, 4, 5, 17, 65, 300)):
        x = torch.randn(m, shape[1], device=DEVICE).to(dtype)
        assert error(fp4.linear(x, *w), exact(x, *w)) <= bound_of(x, w[0]), m


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_regime_without_its_neighbours(dtype):
    """Each kernel serves the M of all others too: right, if not fast."""
    w = weight(256, 512)
    for thresholds in (
        {"gemv": 0},
        {"small": 0},
        {"gemv": 0, "small": 0},
        {"gemv": 0, "small": 0, "mid": 0},
        {"mid": 3000},
        {"small": 0, "mid": 0, "gemv": 100},
    ):
        with dispatch(thresholds=thresholds):
            for m in (1, 2, 7, 40, 100):
                x = torch.randn(m, 512, device=DEVICE).to(dtype)
                assert error(fp4.linear(x, *w), exact(x, *w)) <= bound_of(x, w[0]), (m, thresholds)


def test_all_codes_and_scales_in_every_regime():
    """Subnormal and largest scales, every byte."""
    q = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(127, 4)
    s = torch.arange(127, dtype=torch.uint8, device=DEVICE)[:, None].expand(127, 128).contiguous().view(nvfp4.SCALE_DTYPE)
    w = (q, s, torch.full((), 2.0**-9, device=DEVICE))
    for dtype in (BF16, FP16):
        for m in one_m_per_regime(dtype, q, "bf16"):
            x = torch.randn(m, 2048, device=DEVICE).to(dtype)
            y = fp4.linear(x, *w, None, "bf16")
            assert not y[:, 0].any(), m  # scale byte 0
            # against the sum of magnitudes: a single result may cancel
            magnitude = x.double().abs() @ nvfp4.dequantize(*w, torch.float32).double().abs().mT
            assert ((y.double() - exact(x, *w)).abs() / magnitude.clamp_min(1e-30)).max().item() <= 2**-8, (m, dtype)


def test_huge_and_tiny_activations():
    w = weight(256, 512)
    for m in one_m_per_regime(BF16, w[0]):
        for size in (1e30, 1e-30):
            x = (torch.randn(m, 512, device=DEVICE) * size).to(BF16)
            assert error(fp4.linear(x, *w), exact(x, *w)) <= bound_of(x, w[0]), (m, size)
        x = torch.zeros(m, 512, dtype=BF16, device=DEVICE)
        assert not fp4.linear(x, *w).any()


def test_nan_and_inf_stay_in_their_row():
    w = weight(250, 528), weight(256, 512)
    for q, s, g in w:
        k = q.shape[1] * 2
        for m in [m for m in one_m_per_regime(BF16, q) if m > 1]:
            x = torch.randn(m, k, device=DEVICE).to(BF16)
            clean = fp4.linear(x, q, s, g)
            for bad in (float("nan"), float("inf")):
                x[1, -1] = bad
                y = fp4.linear(x, q, s, g)
                keep = [i for i in range(m) if i != 1]
                assert torch.equal(y[keep], clean[keep]), (m, bad)
                assert not y[1].isfinite().any()


def test_strided_offset_and_misaligned():
    q, s, g = weight(256, 512)
    for m in one_m_per_regime(BF16, q):
        x = torch.randn(m, 512, device=DEVICE).to(BF16)
        want = fp4.linear(x, q, s, g)
        wide = torch.randn(m, 1200, device=DEVICE).to(BF16)
        wide[:, 3:515] = x
        flat = torch.empty(m * 512 + 1, dtype=BF16, device=DEVICE)
        flat[1:] = x.flatten()
        assert flat[1:].data_ptr() % 16 != 0
        memory = torch.empty(q.numel() + 1, dtype=torch.uint8, device=DEVICE)
        memory[1:] = q.flatten()
        odd_q = memory[1:].view(q.shape)
        tall = torch.zeros(512, q.shape[1], dtype=torch.uint8, device=DEVICE)
        tall[::2] = q
        for name, args in {
            "columns": (wide[:, 3:515], q, s, g),
            "transposed": (x.t().contiguous().t(), q, s, g),
            "misaligned": (flat[1:].view(m, 512), q, s, g),
            "misaligned codes": (x, odd_q, s, g),
            "strided codes": (x, tall[::2], s, g),
            "3-D": (x.view(1, m, 512), q, s, g),
        }.items():
            assert torch.equal(fp4.linear(*args).view(m, -1), want), (m, name)


def test_a_hundred_runs_one_result():
    w = weight(512, 1024)
    for m in one_m_per_regime(BF16, w[0]):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        first = fp4.linear(x, *w)
        assert all(torch.equal(fp4.linear(x, *w), first) for _ in range(100))


def test_cuda_graph_replays_are_eager_bits():
    w, bias = weight(512, 1024), torch.randn(512, device=DEVICE).to(BF16)
    for m in one_m_per_regime(BF16, w[0]):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        eager = fp4.linear(x, *w, bias)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fp4.linear(x, *w, bias)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fp4.linear(x, *w, bias)
        different = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(1000):
            y.fill_(float("nan"))
            graph.replay()
            different += (y != eager).any()
        assert different.item() == 0, m
        x.mul_(-1)  # the graph reads its inputs anew
        graph.replay()
        assert torch.equal(y, fp4.linear(x, *w, bias))


def test_the_current_stream_is_used():
    w = weight(512, 1024)
    x = torch.randn(64, 1024, device=DEVICE).to(BF16)
    for m in one_m_per_regime(BF16, w[0]):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        want = fp4.linear(x, *w)
        late = torch.full_like(x, float("nan"))
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on another stream would read NaN
            late.copy_(x)
            y = fp4.linear(late, *w)
        stream.synchronize()
        assert torch.equal(y, want), m


def test_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    w = weight(512, 1024)
    other = [t.to("cuda:1") for t in w]
    for m in one_m_per_regime(BF16, w[0]):
        x = torch.randn(m, 1024, device=DEVICE).to(BF16)
        y = fp4.linear(x.to("cuda:1"), *other)  # the current device stays cuda:0
        assert y.device == torch.device("cuda", 1)
        assert torch.equal(y.to(DEVICE), fp4.linear(x, *w))
    with pytest.raises(FP4Error, match="device"):
        fp4.linear(x, *other)


def test_tensors_on_host_and_gpu_are_a_typed_error():
    q, s, g = weight(64, 64)
    with pytest.raises(FP4Error, match="device"):
        fp4.linear(torch.randn(1, 64).to(BF16), q, s, g)
    with pytest.raises(FP4Error, match="device"):
        fp4.linear(torch.randn(1, 64, device=DEVICE).to(BF16), q, s, g.cpu())


def test_empty():
    q, s, g = weight(64, 64)
    bias = torch.randn(64, device=DEVICE).to(BF16)
    assert fp4.linear(torch.empty(0, 64, dtype=BF16, device=DEVICE), q, s, g, bias).shape == (0, 64)
    assert fp4.linear(torch.empty(2, 0, 64, dtype=BF16, device=DEVICE), q, s, g).shape == (2, 0, 64)
    x = torch.empty(3, 0, dtype=BF16, device=DEVICE)
    assert torch.equal(fp4.linear(x, q[:, :0], s[:, :0], g, bias), bias.expand(3, -1))


def test_fp8_path_against_the_bf16_path():
    layer = FP4Linear.from_weight(torch.randn(2048, 2048, device=DEVICE).to(BF16))
    x = torch.randn(1024, 2048, device=DEVICE).to(BF16)
    assert plan_of(x, layer.qdata).pick(1024).regime in ("large_fp8", "wide_fp8")
    r = exact(x, layer.qdata, layer.scale, layer.global_scale)
    layer.prefill = "bf16"
    assert error(layer(x), r) <= 4e-3
    layer.prefill = "fp8"
    rounded = error(layer(x), r)
    assert 4e-3 < rounded <= FP8_BOUND, "not the FP8 path, or a worse one"


@pytest.mark.parametrize("m", [1, 8, 64, 512])
def test_both_doors_give_the_same_bits(m):
    dense = torch.randn(512, 1024, device=DEVICE).to(BF16)
    bias = torch.randn(512, device=DEVICE).to(BF16)
    layer, x = FP4Linear.from_weight(dense, bias), torch.randn(m, 1024, device=DEVICE).to(BF16)
    want = fp4.linear(x, layer.qdata, layer.scale, layer.global_scale, bias)
    assert torch.equal(layer(x), want)
    assert torch.equal(F.linear(x, NVFP4Tensor.from_dense(dense), bias), want)
    assert torch.equal(F.linear(x, layer.weight, bias), want)


def test_autocast():
    layer = FP4Linear.from_weight(torch.randn(256, 512, device=DEVICE), torch.randn(256, device=DEVICE))
    half = copy.deepcopy(layer).to(BF16)
    for m in (1, 8, 64, 512):
        x = torch.randn(m, 512, device=DEVICE)
        with torch.autocast(DEVICE, BF16):
            y = layer(x)
            z = F.linear(x, layer.weight, layer.bias)
        assert y.dtype == BF16
        assert torch.equal(y, half(x.to(BF16)))
        assert torch.equal(z, y)


def test_round_trip_through_pinned_host_memory():
    layer = FP4Linear.from_weight(torch.randn(256, 512, device=DEVICE).to(BF16), torch.randn(256, device=DEVICE).to(BF16))
    x = torch.randn(8, 512, device=DEVICE).to(BF16)
    want = layer(x)
    host = copy.deepcopy(layer).cpu()
    pinned = {name: t.pin_memory() for name, t in host.state_dict().items()}
    assert all(t.is_pinned() for t in pinned.values())
    back = FP4Linear(512, 256, bias=True, dtype=BF16, device=DEVICE)
    back.load_state_dict({name: t.to(DEVICE, non_blocking=True) for name, t in pinned.items()})
    torch.cuda.synchronize()
    assert torch.equal(back(x), want)
    tensor = layer.weight.cpu().pin_memory()
    assert tensor.is_pinned()
    assert torch.equal(F.linear(x, tensor.to(DEVICE), layer.bias), want)
    assert error(host(x.cpu()).to(DEVICE), want.double()) <= 8e-3


def test_dequantize_and_fp8_rounding_are_the_references():
    from fp4_inductor.ops import dequantize_fp8, quantize_rows_fp8

    q, s, g = weight(130, 272)
    for dtype in (BF16, FP16, FP32):
        bits = torch.int32 if dtype == FP32 else torch.int16
        want = nvfp4.dequantize(q.cpu(), s.cpu(), g.cpu(), dtype)
        assert torch.equal(fp4.dequantize(q, s, g, dtype).cpu().view(bits), want.view(bits))
    assert torch.equal(fp4.dequantize_fp8(q, s).view(torch.uint8).cpu(), dequantize_fp8.reference(q.cpu(), s.cpu()).view(torch.uint8))
    for x in (torch.randn(33, 272), torch.randn(5, 5008) * 1e30, torch.randn(3, 48) * 1e-30, torch.full((2, 48), 1e-40), torch.zeros(2, 48)):
        for dtype in (BF16, FP32):
            codes, scale = fp4.quantize_rows_fp8(x.to(dtype).to(DEVICE))
            want, want_scale = quantize_rows_fp8.reference(x.to(dtype))
            assert torch.equal(scale.cpu(), want_scale)
            assert torch.equal(codes.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("act", linear_glu.ACTIVATIONS)
@pytest.mark.parametrize("inner", [48, 1536, 12288, 20000])
def test_act_of_gate_times_up_rounded_to_fp8(act, inner):
    x = torch.randn(67, 2 * inner)
    x[3, inner:] = 0
    x[5] *= 1e-20
    for dtype in (BF16, FP16):
        codes, scale = fp4.quantize_glu_rows_fp8(x.to(dtype).to(DEVICE), act)
        want, want_scale = quantize_glu_rows_fp8.reference(x.to(dtype), act)
        # exp differs in its last bits from the CPU's: a code may be the neighbouring one
        torch.testing.assert_close(scale.cpu(), want_scale, rtol=1e-5, atol=0)
        assert (codes.cpu().float() != want.float()).float().mean() < 5e-3
        assert error(codes.cpu().double() * scale.cpu(), want.double() * want_scale) <= quantize_glu_rows_fp8.CONTRACT.tolerance[torch.float8_e4m3fn]


# --- size --------------------------------------------------------------------------------------------------------


def _enough_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def test_more_than_two_to_the_31_bytes_of_codes():
    _enough_memory(24)
    n, k = 262_400, 16_448
    assert n * k // 2 > 2**31
    q, s, g = weight(n, k)
    ends = torch.cat([torch.arange(64), torch.arange(n - 64, n)]).to(DEVICE)
    for m in (1, 2, 8, 40, 300):
        for prefill in ("auto", "bf16") if m == 300 else ("auto",):
            x = torch.randn(m, k, device=DEVICE).to(BF16)
            y = fp4.linear(x, q, s, g, None, prefill)
            assert error(y[:, ends], exact(x, q[ends], s[ends], g)) <= bound_of(x, q, prefill), (m, prefill)
            del y
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mid", [0, 1 << 20], ids=["large", "mid"])
def test_more_than_two_to_the_31_results(mid):
    _enough_memory(12)
    m, n, k = 66_000, 33_008, 64
    assert m * n > 2**31
    w = weight(n, k)
    x = torch.randn(m, k, device=DEVICE).to(BF16)
    ends = torch.cat([torch.arange(64), torch.arange(m - 64, m)]).to(DEVICE)
    with dispatch(thresholds={"mid": mid}):
        y = fp4.linear(x, *w)
        bound = bound_of(x, w[0])
    assert error(y[ends], exact(x[ends], *w)) <= bound
    del y
    torch.cuda.empty_cache()


@pytest.mark.parametrize("prefill", ["auto", "bf16"])
def test_memory_of_many_rows(prefill):
    """A call holds its activations, one transient weight, and its result; nothing is kept."""
    m, n, k = 4096, 8192, 8192
    w, x = weight(n, k), torch.randn(m, k, device=DEVICE).to(BF16)
    fp4.linear(x, *w, None, prefill)  # the library's workspace is allocated once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = fp4.linear(x, *w, None, prefill)
    fp8 = plan_of(x, w[0], prefill).pick(m).regime == "large_fp8"
    transient = n * k + m * k if fp8 else 2 * n * k
    library = 40 << 20  # cuBLASLt's workspace, allocated per call
    assert torch.cuda.max_memory_allocated() - before <= transient + 2 * m * n + library
    del y
    assert torch.cuda.memory_allocated() <= before
