"""Random shapes, dtypes, layouts, searches and doors against float64: no wrong answer, no crash."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_inductor import FP4Linear, NVFP4Tensor
from fp4_inductor.ops import CONTRACTS

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEARCHES = st.sampled_from(["amax", "four_over_six", "mse"])
LEAD = st.lists(st.integers(0, 5), max_size=3)
SIZE = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 112, 130, 272]))
SEED = st.integers(0, 2**31)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm()) if want.numel() else 0.0


def layout(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "offset":
        return torch.cat([x.new_ones(*x.shape[:-1], 3), x], -1)[..., 3:]
    if kind == "pitch":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.mT.contiguous().mT if kind == "transposed" and x.dim() > 1 else x


@settings(max_examples=150, deadline=None)
@given(LEAD, SIZE, SIZE, DTYPES, SEARCHES, st.booleans(), st.sampled_from(["plain", "offset", "pitch", "transposed"]), SEED)
def test_linear(lead, n, k, dtype, search, with_bias, kind, seed):
    g = torch.Generator().manual_seed(seed)
    w = (torch.randn(n, k, generator=g) / k**0.5).to(dtype)
    bias = torch.randn(n, generator=g).to(dtype) if with_bias else None
    x = layout(torch.randn(*lead, k, generator=g).to(dtype), kind)
    layer = FP4Linear.from_weight(w, bias, scale_search=search)
    dense = layer.dequantize(torch.float32).double()
    got = layer(x)
    assert (got.shape, got.dtype) == ((*lead, n), dtype)
    assert got.is_contiguous()
    want = F.linear(x.double(), dense, None if bias is None else bias.double())
    # Against the size of the terms: a bias may cancel a product, and leave nothing but its rounding.
    terms = F.linear(x.double().abs(), dense.abs(), None if bias is None else bias.double().abs())
    assert (got.double() - want).norm() <= CONTRACTS["linear"].tolerance[dtype] * terms.norm()
    if not layer.padding:
        assert torch.equal(F.linear(x, layer.weight, bias), got)
        if x.dim() > 1 and not with_bias:
            assert torch.equal(x @ layer.weight.t(), got)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(0, 9), st.integers(0, 40), st.integers(0, 5), DTYPES, SEARCHES, SEED)
def test_bmm(e, m, n, blocks, dtype, search, seed):
    g = torch.Generator().manual_seed(seed)
    k = 16 * blocks
    q = NVFP4Tensor.from_dense((torch.randn(e, n, k, generator=g) / max(k, 1) ** 0.5).to(dtype), search)
    x = torch.randn(e, m, k, generator=g).to(dtype)
    got = torch.bmm(x, q.mT)
    assert (got.shape, got.dtype) == ((e, m, n), dtype)
    want = x.double() @ q.dequantize(torch.float32).double().mT
    assert relative(got, want) <= CONTRACTS["bmm"].tolerance[dtype] or not want.any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_slices(n, blocks, data):
    """Any slice of rows and columns reads as the dense weight's, packed where it can be."""
    q = NVFP4Tensor.from_dense(torch.randn(n, 16 * blocks))
    dense = q.dequantize()
    for axis, size in ((0, n), (1, 16 * blocks)):
        bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
        start, stop = data.draw(bound), data.draw(bound)
        index = (slice(None),) * axis + (slice(start, stop),)
        got = q[index]
        assert torch.equal(got.dequantize() if isinstance(got, NVFP4Tensor) else got, dense[index])
        first, last, _ = slice(start, stop).indices(size)
        if axis == 0 or (first % 16 == 0 and max(last, first) % 16 == 0):
            assert isinstance(got, NVFP4Tensor)
