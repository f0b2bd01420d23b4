"""What of test_dense_faults.py needs a GPU: sizes beyond 2^31, streams, graph capture, pinned memory."""

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor import FP4Linear, NVFP4Tensor, errors

pytestmark = pytest.mark.gpu


def layer_of(n=256, k=512, dtype=torch.bfloat16, **options) -> FP4Linear:
    return FP4Linear.from_weight(torch.randn(n, k, device="cuda").to(dtype) / k**0.5, **options)


def random_parts(n: int, k: int):
    """Codes of any value and scales around one, without a dense weight of that size."""
    qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0x30, 0x40, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    return qdata, scale, torch.tensor(1.0 / k**0.5, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 16, 4096])
def test_a_weight_of_more_than_2_31_elements(m):
    n, k = 2**16 + 16, 2**15
    assert n * k > 2**31
    qdata, scale, g = random_parts(n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    last = slice(n - 64, n)
    got = torch.ops.fp4.linear(x, qdata, scale, g, None, "bf16")[:, last]
    want = x.double() @ torch.ops.fp4.dequantize(qdata[last], scale[last], g, torch.float32).double().mT
    assert float((got.double() - want).norm() / want.norm()) < 1e-2
    assert torch.equal(torch.ops.fp4.dequantize(qdata, scale, g, torch.bfloat16)[last], torch.ops.fp4.dequantize(qdata[last], scale[last], g, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**16 + 16, 2**15, 64), (2**15, 64, 2**16 + 16)], ids=["output", "activation"])
def test_an_output_or_activation_of_more_than_2_31_elements(shape):
    m, n, k = shape
    assert m * max(n, k) > 2**31
    layer = FP4Linear(k, n, device="cuda", prefill="bf16")
    layer.qdata, layer.scale, layer.global_scale = random_parts(n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    got, rows = layer(x), slice(m - 8, m)
    want = x[rows].double() @ layer.dequantize(torch.float32).double().mT
    assert float((got[rows].double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("m", [1, 4, 64])
def test_graph_replay_has_the_bits_of_eager(m):
    layer, x = layer_of(prefill="bf16"), torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(1000):
        x.normal_()
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("m", [1, 4, 64])
def test_the_current_stream_is_used(m):
    layer, x = layer_of(prefill="bf16"), torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = torch.zeros_like(x).copy_(x)  # only this stream's order makes it ready in time
        got = layer(late)
    stream.synchronize()
    assert torch.equal(got, want)


def test_two_devices_are_refused():
    layer = layer_of()
    with pytest.raises(errors.DeviceError, match=r"cpu.*cuda.*Move"):
        layer(torch.randn(3, 512, dtype=torch.bfloat16))
    with pytest.raises(errors.DeviceError, match=r"cuda.*one device"):
        NVFP4Tensor(layer.qdata, layer.scale.cpu(), layer.global_scale)


def test_pinned_and_offloaded_weights_keep_their_bits():
    q = NVFP4Tensor.from_dense(torch.randn(64, 96))
    pinned = q.pin_memory()
    assert pinned.is_pinned()
    back = pinned.to("cuda", non_blocking=True).cpu()
    assert torch.equal(back.qdata, q.qdata)
    x = torch.randn(5, 96, device="cuda")
    torch.testing.assert_close(F.linear(x, q.cuda()).cpu(), F.linear(x.cpu(), q), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 4, 64])
def test_a_hundred_runs_have_one_hash(m):
    layer, x = layer_of(prefill="bf16"), torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    assert len({layer(x).view(torch.uint8).cpu().numpy().tobytes() for _ in range(100)}) == 1
