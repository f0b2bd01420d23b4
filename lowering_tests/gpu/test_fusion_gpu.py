"""Merged siblings, act(gate) * up in one kernel, the FP8 head and the rounding of activations, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.modules import FP8Linear, pack_siblings
from fp4_inductor.ops import linear_fp8, linear_glu
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.gpu.helpers import BF16, DEVICE, FP8_BOUND, FP16, error, exact, weight

pytestmark = pytest.mark.gpu
K = 1040  # K % 16 == 0 only


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


class Siblings(nn.Module):
    def __init__(self, sizes, dtype=BF16, k=K):
        super().__init__()
        self.layers = nn.ModuleList(
            FP4Linear.from_weight(torch.randn(n, k, device=DEVICE).to(dtype) * 10**i, torch.randn(n, device=DEVICE).to(dtype) if i % 2 else None)
            for i, n in enumerate(sizes)
        )
        pack_siblings(list(self.layers))

    def forward(self, x):
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m", [1, 2, 5, 33, 200, 2048])
def test_siblings(m, dtype):
    """Global scales a hundred times apart: a row that took its neighbour's would be far off."""
    model = Siblings((256, 40, 72), dtype)
    x = torch.randn(m, K, device=DEVICE).to(dtype)
    reset_matches()
    got = torch.compile(model, fullgraph=True)(x)
    assert matches() == {"siblings": 1}
    bound = FP8_BOUND if m > 64 and dtype == BF16 else 8e-3
    for y, layer in zip(got, model.layers, strict=True):
        assert error(y, exact(x, layer.qdata, layer.scale, layer.global_scale, layer.bias)) <= bound, m


def test_graph_replay_of_merged_siblings_is_bit_equal():
    model = Siblings((256, 64, 64))
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(1, K, device=DEVICE, dtype=BF16)
    first = [y.clone() for y in compiled(x)]
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), first, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("act", linear_glu.ACTIVATIONS)
@pytest.mark.parametrize(("m", "inner", "k"), [(1, 512, 4096), (1, 33, 1040), (3, 129, 48), (1, 12288, 4096)])
def test_glu_kernel(m, inner, k, act, dtype):
    from fp4_inductor.kernels.linear_glu import cuda

    q, s, g = weight(2 * inner, k)
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    bias = torch.randn(2 * inner, device=DEVICE).to(dtype)
    for scale, b in ((g, None), (torch.stack([g, g * 3]), bias)):
        y = cuda.one_row(x, q, s, scale, b, act)
        want = linear_glu.reference(x.double().float(), q, s, scale, None if b is None else b.float(), act)
        assert error(y, want.double()) <= (4e-3 if dtype == BF16 else 1e-3) * (2 if m * inner < 64 else 1)


def test_compiled_glu():
    gate, up = (FP4Linear.from_weight(torch.randn(512, K, device=DEVICE).to(BF16) / K**0.5) for _ in range(2))
    pack_siblings([gate, up])

    def forward(x, residual):
        return F.silu(gate(x)) * up(x) + residual

    for m, candidates in (
        (1, ("triton_gemv_glu",)),
        (1, ()),
        (40, ("triton_gemv_glu",)),
        (8, ("cuda_small_glu",)),
        (8, ("cuda_small_glu", "cuda_small_pointwise")),
    ):
        x, residual = torch.randn(m, K, device=DEVICE, dtype=BF16), torch.randn(m, 512, device=DEVICE, dtype=BF16)
        with dispatch(candidates=candidates):
            torch._dynamo.reset()
            reset_matches()
            y = torch.compile(forward, fullgraph=True)(x, residual)
            assert matches() == {"siblings": 1, "linear_glu": 1}
        halves = [exact(x, layer.qdata, layer.scale, layer.global_scale) for layer in (gate, up)]
        assert error(y, F.silu(halves[0]) * halves[1] + residual.double()) <= 1e-2


@pytest.mark.parametrize("m", [1, 2, 64])
@pytest.mark.parametrize(("n", "k"), [(32000, 1024), (1000, 50), (4099, 576)])
def test_fp8_head(m, n, k):
    layer = FP8Linear.from_weight(torch.randn(n, k, device=DEVICE).to(BF16), torch.randn(n, device=DEVICE).to(BF16))
    x = torch.randn(m, k, device=DEVICE, dtype=BF16)
    want = linear_fp8.reference(x.float(), layer.qdata, layer.scale, layer.bias.float()).double()
    for f in (layer, torch.compile(layer, fullgraph=True)):
        assert error(f(x), want) <= (FP8_BOUND if m > 1 and n % 16 == 0 and k % 16 == 0 else 8e-3)


def test_fused_rounding_has_the_bits_of_the_op():
    """RMSNorm, then the FP8 path: codes and scales of the compiled graph against fp4.quantize_rows_fp8 of the rounded activation."""
    layer = FP4Linear.from_weight(torch.randn(256, 1024, device=DEVICE).to(BF16), prefill="fp8")
    x = torch.randn(512, 1024, device=DEVICE, dtype=BF16)
    x[3] = 0
    x[5] *= 1e-30
    w = torch.rand(1024, device=DEVICE, dtype=BF16)

    def norm(x):
        return F.rms_norm(x, (1024,), w)

    h = torch.compile(norm)(x)
    y = torch.compile(lambda x: layer(norm(x)), fullgraph=True)(x)
    # The same activation bits, the same codes, the same product: the result is that of the eager op on h.
    assert torch.equal(y, layer(h))
