"""Rows of a KV cache against tables and rules written here once more, in float64 and bit for bit: every code, every block scale, every tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.formats import kv
from lowering_tests.formats.test_nvfp4 import MAGNITUDES, MIDPOINTS, SCALES, e4m3, element_codes, error, scale_code

KINDS = (kv.FP8, kv.INT8, kv.NVFP4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
E4M3 = np.array([e4m3(b) for b in range(256)])


def half(x: torch.Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-24, 3.0])
def test_every_code_and_every_block_scale(scale):
    s = torch.tensor(scale, dtype=torch.float16)
    exact = float(s)
    every = torch.arange(256, dtype=torch.uint8)
    signed = every.view(torch.int8)
    for kind, codes, table in ((kv.FP8, every.view(torch.float8_e4m3fn), E4M3), (kv.INT8, signed, np.arange(256).astype(np.int8).astype(float))):
        got = kv.dequantize(kv.Rows(codes[None], s[None]), kind)
        np.testing.assert_array_equal(got[0].numpy(), (table * exact).astype(np.float32))
    codes = every.repeat(127).view(127, 256)  # a row for each block scale: 512 numbers, the low nibble first
    blocks = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].expand(127, 32)
    got = kv.dequantize(kv.Rows(codes, s.expand(127), blocks), kv.NVFP4)
    numbers = np.stack([E2M1[np.arange(256) % 16], E2M1[np.arange(256) // 16]], -1).reshape(-1)
    np.testing.assert_array_equal(got.numpy(), (numbers[None] * SCALES[:, None] * exact).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_added_before_the_one_rounding_to_the_dtype(dtype):
    rows, mean = kv.quantize(torch.randn(2, 3, 7, 32), kv.INT8), torch.randn(2, 3, 32)
    got = kv.dequantize(rows, kv.INT8, mean, dtype)
    assert torch.equal(got, (kv.dequantize(rows, kv.INT8) + mean[:, :, None]).to(dtype)) and got.dtype == dtype


# --- encoding -----------------------------------------------------------------------------------------------------


def test_every_tie_goes_to_the_even_code():
    """The scale is a power of two, so that numbers between two codes are exactly between them."""
    s = 2.0**-3
    between = torch.arange(-126.5, 127.0) * s
    rows = kv.quantize(torch.cat([torch.tensor([127 * s]), between, torch.zeros(2)])[None], kv.INT8)
    assert float(rows.scale) == s
    np.testing.assert_array_equal(rows.codes[0, 1:-2].numpy(), np.rint(np.arange(-126.5, 127.0)))
    positive = E4M3[:127]
    ties = np.concatenate([(positive[1:] + positive[:-1]) / 2, [448.0, 0.0]])
    rows = kv.quantize(torch.from_numpy(np.concatenate([ties, -ties]) * s).float()[None], kv.FP8)
    assert float(rows.scale) == s
    want = np.concatenate([np.arange(126) + np.arange(126) % 2, [126, 0]])  # the even one of b and b + 1
    np.testing.assert_array_equal(rows.codes.view(torch.uint8)[0].numpy() & 127, np.concatenate([want, want]))
    np.testing.assert_array_equal(rows.codes.view(torch.uint8)[0].numpy()[len(want) :] >> 7, np.array([x != 0 or np.signbit(-x) for x in ties]))
    # Of nvfp4 a first block makes the row's scale; each other block has a maximum of 6 times a block scale, and every midpoint.
    scales = SCALES[SCALES <= 256]
    blocks = np.zeros((len(scales), 16))
    blocks[:, 0], blocks[:, 1:8], blocks[:, 8:15] = 6, MIDPOINTS, -MIDPOINTS
    row = np.concatenate([[1536.0] + [0] * 15, (blocks * scales[:, None]).reshape(-1)]) * s
    rows = kv.quantize(torch.from_numpy(row).float()[None], kv.NVFP4)
    assert float(rows.scale) == s
    check_blocks(row[None], rows)


def check_blocks(x: np.ndarray, rows: kv.Rows) -> None:
    """``x [R, D]`` float32 numbers in float64: the better of max / 6 and max / 4, and then the nearest codes."""
    y = (x.astype(np.float32) / np.where(half(rows.scale) > 0, half(rows.scale), 1)[:, None].astype(np.float32)).astype(np.float64)
    y = y.reshape(len(x), -1, 16)
    amax = np.abs(y).max(-1)
    choices = [scale_code(amax, 6), scale_code(amax, 4)]
    off = np.stack([error(y, choice) for choice in choices])
    got = rows.blocks.view(torch.uint8).numpy().astype(np.int64)
    taken = np.where(got == choices[0], off[0], np.where(got == choices[1], off[1], math.inf))
    assert (taken <= off.min(0) * (1 + 1e-5)).all(), "not the better of the two"
    low = element_codes(y, SCALES[got]).reshape(len(x), -1)
    np.testing.assert_array_equal(rows.codes.numpy(), low[:, 0::2] + 16 * low[:, 1::2])
    assert got.shape == amax.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_rows(kind, dtype):
    x = (torch.randn(400, 64) * torch.logspace(-6, 4, 400)[:, None]).to(dtype)
    x[7] = 0
    rows = kv.quantize(x, kind)
    wide = x.float().numpy()
    amax = np.abs(wide).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(amax > 0, np.clip(amax / np.float32(kind.top), 2.0**-24, 65504), 0).astype(np.float16)
    np.testing.assert_array_equal(rows.scale.numpy(), scale)
    assert not rows.codes[7].view(torch.uint8).any() and not kv.dequantize(rows, kind)[7].any()
    if kind.blocks:
        return check_blocks(wide.astype(np.float64), rows)
    y = wide / np.where(scale > 0, scale, 1).astype(np.float32)[:, None]
    if kind.name == "int8":
        np.testing.assert_array_equal(rows.codes.numpy(), np.clip(np.rint(y), -127, 127))
    else:
        code = scale_code(np.abs(y.astype(np.float64)), 1)  # nearest, ties to even, saturating; a scale is never rounded to zero, a number is
        code = np.where(np.abs(y) <= SCALES[1] / 2, 0, code)
        np.testing.assert_array_equal(rows.codes.view(torch.uint8).numpy() & 127, code)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_not_finite_stays_in_its_row(kind):
    x = torch.randn(2, 3, 9, 48)
    clean = kv.dequantize(kv.quantize(x, kind), kind)
    for bad in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[1, 2, 4, 5] = bad
        got = kv.dequantize(kv.quantize(y, kind), kind)
        assert got[1, 2, 4].isnan().all()
        got[1, 2, 4] = clean[1, 2, 4]
        assert torch.equal(got, clean)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_largest_and_the_smallest_numbers(kind):
    for x in (3e38, 65504.0, 1e-30, 1e-45):
        rows = kv.quantize(torch.full((1, 16), x), kind)
        assert torch.isfinite(kv.dequantize(rows, kind)).all() and float(rows.scale) > 0


@pytest.mark.parametrize(("kind", "bound"), [(kv.FP8, 0.03), (kv.INT8, 0.008), (kv.NVFP4, 0.1)], ids=lambda x: getattr(x, "name", None))
def test_a_constant_in_all_keys_costs_nothing_once_its_mean_is_subtracted(kind, bound):
    """The bias of Qwen 2.5: without the mean, 4 bits lose everything that is not the bias in its blocks."""
    plain = torch.randn(2, 2, 200, 64)
    keys = plain.clone()
    keys[..., 17] += 600
    keys[..., 29] -= 437
    mean = kv.mean_of(keys)
    lost = (kv.dequantize(kv.quantize(keys, kind, mean), kind, mean) - keys).norm() / plain.norm()
    assert lost < bound
    without = (kv.dequantize(kv.quantize(keys, kind), kind) - keys).norm() / plain.norm()
    assert without > 5 * bound


def test_the_mean_is_of_the_first_tokens_and_of_what_is_finite():
    keys = torch.randn(2, 2, 300, 16)
    torch.testing.assert_close(kv.mean_of(keys), keys[:, :, :128].mean(2))
    keys[0, 1, 3, 5] = math.nan
    got = kv.mean_of(keys)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[0, 1, 5], keys[0, 1, :128, 5].nanmean())
    assert not kv.mean_of(keys[:, :, :0]).any()


# --- layout -------------------------------------------------------------------------------------------------------


def test_bits_and_bytes():
    """What the tables of the docs say is what tensors take."""
    said = {"fp8": 16.25, "k8v4": 12.75, "nvfp4": 9.25}
    for name, f in kv.FORMATS.items():
        assert f.bits(128) == said[name]
        taken = [kv.empty(kind, (3, 5, 7), 128, torch.device("cpu")) for kind in (f.key, f.value)]
        assert 8 * sum(t.nbytes for rows in taken for t in rows if t is not None) == 3 * 5 * 7 * 128 * f.bits(128)
        assert kv.of_dtypes(taken[0].codes.dtype, taken[1].codes.dtype) is f and kv.named(name) is f
    assert kv.named("bf16") is None and kv.of_dtypes(torch.bfloat16, torch.bfloat16) is None
    assert len({(f.key.dtype, f.value.dtype) for f in kv.FORMATS.values()}) == len(kv.FORMATS), "dtypes tell the format"


@pytest.mark.parametrize("slots", [68, 69, 75, 132])
def test_where_exact_tokens_lie(slots):
    """Written one after the other; what a slot says that it holds is what was written there last."""
    held: dict[int, int] = {}
    for position in range(300):
        said = kv.exact_position(torch.tensor(position - 1), slots).tolist()
        assert {slot: p for slot, p in enumerate(said) if p >= 0} == held
        held[int(kv.exact_slot(torch.tensor(position), slots))] = position
        needed = {p for p in range(position + 1) if kv.is_exact(torch.tensor(position), torch.tensor(p))}
        assert needed == {*range(min(4, position + 1)), *range(max(0, position - 63), position + 1)}
        assert needed <= {*held.values()}
    assert kv.exact_slots(1000, slots - 68) == slots and kv.exact_slots(10, 128) == 14


# --- refusals -----------------------------------------------------------------------------------------------------


def test_refusals():
    with pytest.raises(errors.ConfigError, match=r"fp4.*bf16.*k8v4"):
        kv.named("fp4")
    for width in (0, 8, 24, 100):
        with pytest.raises(errors.ShapeError, match=rf"{width}.*multiples of 16"):
            kv.check_width(width)
    for kind in KINDS:
        rows = kv.quantize(torch.randn(2, 3, 5, 32), kind)
        kv.check_rows(kind, rows, 32)
        other = torch.float16 if kind is not kv.INT8 else torch.uint8
        for changed, error_ in (
            (rows._replace(codes=rows.codes.to(other)), errors.DTypeError), (rows._replace(scale=rows.scale.float()), errors.DTypeError),
            (rows._replace(scale=rows.scale[..., :4]), errors.ShapeError), (rows._replace(codes=rows.codes[..., :8]), errors.ShapeError),
            (rows._replace(blocks=None if kind.blocks else rows.scale), errors.ShapeError),
        ):  # fmt: skip
            with pytest.raises(error_, match=kind.name):
                kv.check_rows(kind, changed, 32)
