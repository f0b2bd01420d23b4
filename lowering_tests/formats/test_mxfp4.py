"""MXFP4 against exact arithmetic: E8M0 scales are powers of two, so float64 decides every case without rounding."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.formats import e2m1, mxfp4, nvfp4

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def reference(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[..., K]`` float64 -> codes ``[..., K]``, scale bytes ``[..., K/32]``: floor exponent, ties to even, saturating."""
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1)
    floor_log2 = np.frexp(amax)[1] - 1
    byte = np.where(amax > 0, np.clip(floor_log2 - 2 + 127, 0, 254), 0)
    a = np.abs(blocks)[..., None] / 2.0 ** (byte[..., None, None] - 127)
    above, tie = a > MIDPOINTS, a == MIDPOINTS
    tie[..., 0::2] = False  # between an even code and the odd one above it the tie stays below
    codes = (above | tie).sum(-1) + 8 * np.signbit(blocks)
    return codes.reshape(w.shape), byte


def test_all_scale_bytes_decode():
    value = mxfp4.scale_value(torch.arange(256, dtype=torch.uint8))
    assert math.isnan(value[255])
    assert [Fraction(v) for v in value[:255].tolist()] == [Fraction(2) ** (b - 127) for b in range(255)]


def test_every_scale_byte_is_produced_at_its_power_of_two_and_its_neighbours():
    # amax = 2 ** (b - 127 + 2) is the first that gets byte b; one ulp less gets b - 1.
    for b in range(1, 253):
        first = np.float32(2.0 ** (b - 125))
        row = torch.zeros(2, 32)
        row[0, 7], row[1, 30] = float(first), -float(np.nextafter(first, np.float32(0)))
        assert mxfp4.quantize(row)[1].flatten().tolist() == [b, b - 1]
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert mxfp4.quantize(largest)[1].item() == 252
    assert torch.isfinite(mxfp4.dequantize(*mxfp4.quantize(largest), torch.float32)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 32), (3, 7, 96), (2, 1, 64)])
def test_bit_equal_to_exact_reference(shape, dtype):
    w = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:-1], shape[-1] // 32, 1)).float()).expand(*shape[:-1], -1, 32).flatten(-2)
    w = w.to(dtype)
    codes, byte = reference(w.double().numpy())
    qdata, scale = mxfp4.quantize(w)
    assert np.array_equal(e2m1.unpack(qdata).numpy(), codes)
    assert np.array_equal(scale.numpy(), byte)
    signed = np.where(codes & 8, -1.0, 1.0) * MAGNITUDES[codes & 7]
    want = signed * np.repeat(2.0 ** (byte - 127), 32, -1)
    assert np.array_equal(mxfp4.dequantize(qdata, scale, torch.float32).double().numpy(), want)


def test_ties_at_every_exponent():
    midpoints = torch.tensor([4.0, *MIDPOINTS.tolist(), *(-MIDPOINTS).tolist()])
    row = torch.zeros(32)
    row[: midpoints.numel()] = midpoints
    exponents = torch.arange(-120, 120, 7)
    codes = e2m1.unpack(mxfp4.quantize(torch.ldexp(row.expand(len(exponents), 32), exponents[:, None]))[0])
    assert (codes == torch.tensor([6, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, *[0] * 17], dtype=torch.uint8)).all()


def test_zero_and_subnormal_blocks():
    w = torch.zeros(3, 32)
    w[1] = 1e-45
    w[2, ::2] = -1e-40
    qdata, scale = mxfp4.quantize(w)
    assert scale[0].item() == 0
    assert not qdata[0].any()
    back = mxfp4.dequantize(qdata, scale, torch.float32)
    assert torch.isfinite(back).all()
    codes, byte = reference(w.double().numpy())
    assert np.array_equal(e2m1.unpack(qdata).numpy(), codes)
    assert np.array_equal(scale.numpy(), byte)


def test_empty():
    assert [t.shape for t in mxfp4.quantize(torch.zeros(0, 32))] == [(0, 16), (0, 1)]
    assert [t.shape for t in mxfp4.quantize(torch.zeros(3, 0))] == [(3, 0), (3, 0)]


def test_gaussian_error_is_the_recorded_one():
    w = torch.randn(512, 1024)
    error = (mxfp4.dequantize(*mxfp4.quantize(w), torch.float32) - w).norm() / w.norm()
    assert 0.110 < error < 0.122  # design figure on trained weights 0.118


def test_bad_input_is_typed():
    with pytest.raises(errors.ShapeError, match=r"\(4, 48\).*K % 32"):
        mxfp4.quantize(torch.zeros(4, 48))
    with pytest.raises(errors.DTypeError, match="float64"):
        mxfp4.quantize(torch.zeros(4, 32, dtype=torch.float64))
    for bad in (math.nan, math.inf, -math.inf):
        w = torch.zeros(4, 32)
        w[2, 3] = bad
        with pytest.raises(errors.NonFiniteError, match="1 of 128"):
            mxfp4.quantize(w)


# --- as NVFP4 ------------------------------------------------------------------------------------------------------


def _matrix(low: int, span: int, lead: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes under exponents that use the whole of ``low .. low + span``."""
    qdata = torch.randint(0, 256, (*lead, 8, 64), dtype=torch.uint8)
    scale = torch.randint(low, low + span + 1, (*lead, 8, 4), dtype=torch.uint8)
    scale[..., 0, 0], scale[..., 7, 3] = low, low + span
    qdata[..., 0, 0] |= 1  # blocks of zeros do not count
    qdata[..., 7, 63] |= 1
    return qdata, scale


@pytest.mark.parametrize("span", range(18))
@pytest.mark.parametrize("low", [1, 60, 120, 200])
def test_as_nvfp4_without_loss(low, span):
    qdata, scale = _matrix(low, span)
    got = mxfp4.to_nvfp4(qdata, scale)
    assert got is not None
    assert got[0] is qdata
    assert int(got[1].view(torch.uint8).max()) <= 0x7E
    exact = nvfp4.dequantize(*got, torch.float32)
    want = mxfp4.dequantize(qdata, scale, torch.float32)
    assert torch.equal(exact.view(torch.int32), want.view(torch.int32))  # the sign of zero included


def test_each_expert_has_its_own_range():
    parts = [_matrix(low, 17) for low in (20, 90, 180)]
    qdata, scale = (torch.stack(p) for p in zip(*parts, strict=True))
    got = mxfp4.to_nvfp4(qdata, scale)
    assert got is not None
    assert got[2].shape == (3,)
    assert torch.equal(nvfp4.dequantize(*got, torch.float32), mxfp4.dequantize(qdata, scale, torch.float32))


@pytest.mark.parametrize(("low", "span"), [(100, 18), (1, 30), (240, 14)])
def test_what_nvfp4_cannot_hold_is_refused(low, span):
    """18 octaves are one too many; above 2**115 the largest product would overflow float32."""
    assert mxfp4.to_nvfp4(*_matrix(low, span)) is None


def test_blocks_of_zeros_do_not_count():
    qdata, scale = _matrix(100, 3)
    qdata[3, :16], scale[3, 0] = 0x80, 254  # 0 and -0
    got = mxfp4.to_nvfp4(qdata, scale)
    assert got is not None
    w = nvfp4.dequantize(*got, torch.float32)
    assert torch.equal(w[3, :32], torch.zeros(32))
    assert torch.equal(torch.signbit(w[3, :32]), torch.tensor([False, True] * 16))
    empty = mxfp4.to_nvfp4(torch.zeros(4, 16, dtype=torch.uint8), torch.full((4, 1), 7, dtype=torch.uint8))
    assert empty is not None
    assert torch.equal(nvfp4.dequantize(*empty), torch.zeros(4, 32, dtype=torch.bfloat16))
