"""Transient weights on a GPU: every dtype, dense and 2:4, bit-equal to the references; matrices without rows; 2**31 weights."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels.dequantize import launch
from fp4_inductor.ops import dequantize_fp8
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, FP32

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn


def scales(shape):
    """Every scale, subnormal ones too."""
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=DEVICE).view(FP8)


def random_bytes(shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def weight(*shape, sparse=False):
    """``(packed, scale, global scale)``"""
    *lead, n, k = shape
    g = torch.rand(lead, device=DEVICE) + 0.5
    if not sparse:
        return (random_bytes((*lead, n, k // 2)),), scales((*lead, n, k // 16)), g
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=DEVICE)[torch.randint(0, 6, (*lead, n, k // 4), device=DEVICE)]
    return (random_bytes((*lead, n, k // 4)), sparse24.pack_meta(nibble)), scales((*lead, n, k // 16)), g


def reference(packed, scale, g, dtype):
    packed, scale, g = [t.cpu() for t in packed], scale.cpu(), g.cpu()
    codes = sparse24.decompress(*packed) if len(packed) == 2 else packed[0]
    if dtype == FP8:
        return dequantize_fp8.reference(codes.flatten(0, -2), scale.flatten(0, -2)).view(*scale.shape[:-1], -1)
    return nvfp4.dequantize(codes, scale, g, dtype)


def same(got, want):
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    return torch.equal(got.cpu().view(bits), want.view(bits))


def of(packed, scale, g, dtype, ends=None):
    return launch.transient(packed, scale, None if dtype == FP8 else g, dtype, ends)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16, FP32], ids=str)
def test_every_shape(dtype, sparse):
    for shape in ((1, 32), (7, 96), (130, 288), (2100, 512), (5, 33, 96), (300, 2, 32), (3, 700, 544), (2, 3, 5, 64)):
        w = weight(*shape, sparse=sparse)
        assert same(of(*w, dtype), reference(*w, dtype)), shape
    if not sparse:
        for shape in ((1, 16), (5, 48), (3, 7, 80)):
            w = weight(*shape)
            assert same(of(*w, dtype), reference(*w, dtype)), shape


@pytest.mark.parametrize("dtype", [FP8, BF16, FP32], ids=str)
def test_every_byte_under_every_scale(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8, device=DEVICE)[:, None].expand(127, 32).contiguous().view(FP8)
    for g in (1.7, 1e-38, 1e36):
        w = (codes,), scale, torch.tensor(g, device=DEVICE)
        assert same(of(*w, dtype), reference(*w, dtype))


@pytest.mark.parametrize("dtype", [FP8, BF16, FP32], ids=str)
def test_views_at_any_address(dtype):
    codes, scale = random_bytes((65, 32)), scales((66, 4))
    w = (codes[1:].flatten()[8:].view(-1)[: 63 * 32].view(63, 32),), scale.flatten()[5:][: 63 * 4].view(63, 4), torch.tensor(0.3, device=DEVICE)
    assert same(of(*w, dtype), reference(*w, dtype))
    q, s, g = weight(4, 40, 64)
    w = (q[0][:, 16:32],), s[:, 16:32], g  # some outputs of every expert
    assert same(of(*w, dtype), reference(*w, dtype))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(6, 96, 128), (40, 2, 64)], ids=str)
def test_matrices_with_rows_are_written_whole(shape, sparse):
    w = weight(*shape, sparse=sparse)
    for dtype in (FP8, BF16):
        want = reference(*w, dtype)
        for _ in range(5):
            counts = torch.randint(-3, 3, (shape[0],), device=DEVICE).clamp_min(0)
            ends = counts.cumsum(0).int()
            some = (counts > 0).cpu()
            assert same(of(*w, dtype, ends)[some.to(DEVICE)], want[some])


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
def test_more_than_two_to_the_31_weights(dtype):
    free, _ = torch.cuda.mem_get_info()
    if free < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    n, k = 33_000, 66_560
    assert n * k > 2**31
    (codes,), scale, g = weight(n, k)
    out = of((codes,), scale, g, dtype)
    for rows in (slice(0, 3), slice(n // 2, n // 2 + 3), slice(n - 3, n)):
        assert same(out[rows], reference((codes[rows],), scale[rows], g, dtype))
    del out
    torch.cuda.empty_cache()
