"""The two foreign 2:4 layouts, from what their documents say, bit by bit."""

import pytest
import torch

from fp4_inductor.errors import ConfigError, DTypeError, ShapeError, SparsityError
from fp4_inductor.formats import e2m1, nvfp4, sparse24
from fp4_inductor.formats import sparse24_layouts as layouts

N, K, E = 8, 64, 3


def weight(*shape) -> sparse24.Sparse24Parts:
    w = torch.randn(shape)
    return sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))


def same(a, b) -> bool:
    return all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a, b, strict=True))


# --- dgx-vllm v7 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(N, K), (E, N, K)])
@pytest.mark.parametrize("k_per_scale", [8, 16])
def test_v7_round_trip(shape, k_per_scale):
    parts = weight(*shape)
    foreign = layouts.to_dgx_v7(parts, k_per_scale)
    assert [tuple(t.shape) for t in foreign] == [(*shape[:-2], K // d, N) for d in (4, 8, k_per_scale)] + [shape[:-2]]
    assert all(t.is_contiguous() for t in foreign)
    assert same(layouts.from_dgx_v7(*foreign), parts)


def test_v7_product_as_its_kernel_computes_it():
    """sum += lut[comp0 & 15] * A[k + (meta & 3)] + lut[comp0 >> 4] * A[k + (meta >> 2 & 3)] + ..., scaled per 8 k."""
    parts = weight(N, K)
    values, meta, scale, g = layouts.to_dgx_v7(parts, 8)
    x, y = torch.randn(K), torch.zeros(N, dtype=torch.float64)
    for n in range(N):
        for k in range(0, K, 8):
            m = int(meta[k // 8, n])
            for i, shift in ((0, 0), (1, 4)):
                c = int(values[k // 4 + i, n])
                kept = e2m1.VALUES[c & 15] * float(x[k + 4 * i + (m >> shift & 3)]) + e2m1.VALUES[c >> 4] * float(x[k + 4 * i + (m >> shift + 2 & 3)])
                y[n] += kept * float(scale[k // 8, n]) * float(g)
    want = sparse24.dequantize_sparse24(*parts, torch.float32).double() @ x.double()
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_v7_bad_input():
    values, meta, scale, g = layouts.to_dgx_v7(weight(N, K), 8)
    odd = scale.clone()
    odd.view(torch.uint8)[1, 2] ^= 1
    with pytest.raises(ShapeError, match=r"1 of 32 blocks.*equal pairs.*keeps the pattern"):
        layouts.from_dgx_v7(values, meta, odd, g)
    with pytest.raises(SparsityError, match="0x05"):
        layouts.from_dgx_v7(values, torch.full_like(meta, 5), scale, g)
    for args in ((values[:-1], meta, scale, g), (values, meta[:, :-1], scale, g), (values, meta, scale[:3], g), (values[0], meta[0], scale[0], g)):
        with pytest.raises(ShapeError):
            layouts.from_dgx_v7(*args)
    with pytest.raises(ConfigError):
        layouts.to_dgx_v7(weight(N, K), 32)


# --- Metal Marlin -----------------------------------------------------------------------------------------------


def test_marlin_worked_example():
    """The block [a, 0, b, 0] has the nibble 8 and stores a, b; block i of a word lies at bits 4 i, its values at bits 8 i."""
    a, b = 3, 13
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 4 * 2], codes[0, 4 * 2 + 2] = a, b  # block 2
    values, meta = sparse24.compress(e2m1.pack(codes))
    words, metadata, _ = layouts.to_metal_marlin(sparse24.Sparse24Parts(values, meta, torch.zeros(1, 2).to(nvfp4.SCALE_DTYPE), torch.tensor(1.0)))
    assert words.shape == (2, 1)
    assert metadata.shape == (1, 1)
    assert int(words[0, 0]) == (a | b << 4) << 16
    assert int(metadata[0, 0]) >> 8 & 15 == 8
    assert [int(metadata[0, 0]) >> 4 * i & 15 for i in (0, 1, 3, 7)] == [4, 4, 4, 4]


def document_pack(codes: torch.Tensor, keep) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes [K, N]`` packed as section 8.2 describes; ``keep(magnitudes)`` gives the two positions."""
    k, n = codes.shape
    values, metadata = torch.zeros(k // 16, n, dtype=torch.int64), torch.zeros(k // 32, n, dtype=torch.int64)
    for column in range(n):
        for block in range(k // 4):
            four = [int(c) for c in codes[4 * block : 4 * block + 4, column]]
            p0, p1 = sorted(keep([c & 7 for c in four]))
            values[block // 4, column] |= (four[p0] | four[p1] << 4) << 8 * (block % 4)
            metadata[block // 8, column] |= (p0 | p1 << 2) << 4 * (block % 8)
    return values.to(torch.int32), metadata.to(torch.int32)


TEXT = {
    "text: ties keep the lower": lambda m: sorted(range(4), key=lambda i: (-m[i], i))[:2],
    "sample: argsort, last two": lambda m: sorted(range(4), key=lambda i: (m[i], i))[2:],
}


@pytest.mark.parametrize("rule", TEXT)
def test_marlin_from_its_packing_procedure(rule):
    codes = torch.randint(0, 16, (K, N), dtype=torch.uint8)
    codes[:4] = 5  # a tie of all four
    values, metadata = document_pack(codes, TEXT[rule])
    scales = torch.full((K // 32, N), 0.125, dtype=torch.float16)
    for dtype in (torch.int32, torch.uint32):
        parts = layouts.from_metal_marlin(values.view(dtype), metadata.view(dtype), scales)
        kept = sparse24.mask_of(parts.meta)
        dense = e2m1.unpack(sparse24.decompress(parts.values, parts.meta))
        assert torch.equal(dense, torch.where(kept, codes.T, 0))
        assert kept[:, :4].nonzero()[:2, 1].tolist() == ([0, 1] if rule.startswith("text") else [2, 3])
        assert torch.equal(parts.scale.float() * parts.global_scale, torch.full((N, K // 16), 0.125))
        assert torch.equal(layouts.to_metal_marlin(parts)[0], values)
        assert torch.equal(layouts.to_metal_marlin(parts)[1], metadata)
    ours = sparse24.magnitude_mask(e2m1.decode(codes).T.contiguous())
    assert torch.equal(ours, kept) == rule.startswith("text")


def test_marlin_round_trip_with_a_power_of_two():
    w = torch.randn(N, K)
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w), global_scale=torch.tensor(2.0**-8))
    back = layouts.from_metal_marlin(*layouts.to_metal_marlin(parts))
    assert torch.equal(back.values, parts.values)
    assert torch.equal(back.meta, parts.meta)
    assert torch.equal(sparse24.dequantize_sparse24(*back), sparse24.dequantize_sparse24(*parts))
    zero = layouts.from_metal_marlin(*layouts.to_metal_marlin(parts)[:2], torch.zeros(K // 16, N, dtype=torch.float16))
    assert not sparse24.dequantize_sparse24(*zero).any()


def test_marlin_bad_input():
    values, metadata, scales = layouts.to_metal_marlin(weight(N, K))
    with pytest.raises(DTypeError, match="no E4M3 numbers"):
        layouts.from_metal_marlin(values, metadata, torch.rand(K // 16, N).half())
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DTypeError):
            layouts.from_metal_marlin(values, metadata, torch.full((K // 16, N), bad).half())
    with pytest.raises(DTypeError):
        layouts.from_metal_marlin(values, metadata, scales.float())
    with pytest.raises(DTypeError):
        layouts.from_metal_marlin(values.short(), metadata, scales)
    with pytest.raises(SparsityError):
        layouts.from_metal_marlin(values, torch.zeros_like(metadata), scales)
    for args in (
        (values[:-1], metadata, scales),
        (values, metadata, scales[:3]),
        (values, metadata, scales.T),
        (values[None], metadata, scales),
        (values[:, 0], metadata, scales),
    ):
        with pytest.raises(ShapeError):
            layouts.from_metal_marlin(*args)
    with pytest.raises(ShapeError, match="one matrix"):
        layouts.to_metal_marlin(weight(E, N, K))
    huge = weight(N, K)._replace(global_scale=torch.tensor(1e10))
    with pytest.raises(DTypeError, match="beyond float16"):
        layouts.to_metal_marlin(huge)
