"""NVFP4 values, scales and codes against a slow reference that decides every rounding by exact float64 comparisons.

Scales have 4 significant bits, code midpoints 3, weights 24: their products are exact in float64, so the reference never
rounds. It is given x = float32(w / global_scale), the one rounding the format's definition leaves to the quantizer.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_inductor import errors
from fp4_inductor.formats import e2m1, nvfp4

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def e4m3(byte: int) -> float:
    """E4M3FN by its definition: bias 7, subnormals, no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


SCALES = np.array([e4m3(b) for b in range(0x7F)])  # 0 .. 448, increasing
SCALE_MIDPOINTS = (SCALES[:-1] + SCALES[1:]) / 2


def scale_code(amax: np.ndarray, divisor: float) -> np.ndarray:
    """Nearest E4M3 code of ``amax / divisor``, ties to even, saturating; positive never becomes 0."""
    above, tie = amax[..., None] > SCALE_MIDPOINTS * divisor, amax[..., None] == SCALE_MIDPOINTS * divisor
    tie[..., 0::2] = False
    return np.where(amax > 0, np.maximum((above | tie).sum(-1), 1), 0)


def element_codes(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    limits = MIDPOINTS * scale[..., None, None]
    a = np.abs(blocks)[..., None]
    above, tie = a > limits, a == limits
    tie[..., 0::2] = False
    magnitude = np.where(scale[..., None] > 0, (above | tie).sum(-1), 0)
    return magnitude + 8 * np.signbit(blocks)


def error(blocks: np.ndarray, code: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    scale = SCALES[code]
    rounded = MAGNITUDES[element_codes(blocks, scale) & 7] * scale[..., None]
    return ((np.abs(blocks) - rounded) ** 2 * weight).sum(-1)


def candidates(blocks: np.ndarray, search: str) -> list[np.ndarray]:
    """In order of preference: among equals the earlier one is taken."""
    amax = np.abs(blocks).max(-1)
    base = scale_code(amax, 6)
    if search == "amax":
        return [base]
    if search == "four_over_six":
        return [base, scale_code(amax, 4)]
    return [base, *(np.where(amax > 0, np.clip(base + d, 1, 0x7E), base) for d in range(-7, 8))]


def check_against_reference(w: torch.Tensor, search: str, global_scale=None, channel_weight=None) -> None:
    qdata, scale, g = nvfp4.quantize(w, search, global_scale, channel_weight)
    lead, (n, k) = w.shape[:-2], w.shape[-2:]
    assert (qdata.shape, scale.shape, g.shape) == ((*lead, n, k // 2), (*lead, n, k // 16), lead)
    assert (qdata.dtype, scale.dtype, g.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    x = (w.float() / g[..., None, None]).double().numpy().reshape(*lead, n, k // 16, 16)
    got = scale.view(torch.uint8).numpy().astype(np.int64)
    weight = 1.0 if channel_weight is None else channel_weight.double().numpy().reshape(k // 16, 16)
    choices = candidates(x, search)
    errors_ = np.stack([error(x, c, weight) for c in choices])
    order = errors_.argmin(0)  # the first of equals
    best = np.take_along_axis(np.stack(choices), order[None], 0)[0]
    least = errors_.min(0)
    # float32 sums of 16 squares are right to 1e-6: only a block with a second candidate that close may differ.
    others = np.where(np.stack(choices) == best, np.inf, errors_).min(0)
    clear = others > least * (1 + 4e-6) + 1e-30
    assert clear.mean() > 0.5
    assert np.array_equal(got[clear], best[clear])
    assert (error(x, got, weight) <= least * (1 + 4e-6) + 1e-30).all()
    assert np.array_equal(e2m1.unpack(qdata).numpy().reshape(x.shape), element_codes(x, SCALES[got]))


# --- tables -----------------------------------------------------------------------------------------------------


def test_all_scale_bytes_decode():
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    ones = torch.full((256, 8), 0x22, dtype=torch.uint8)  # code 2 is 1.0
    got = nvfp4.dequantize(ones, byte.view(torch.float8_e4m3fn), torch.tensor(1.0), torch.float32)
    want = np.array([e4m3(b) for b in range(256)], dtype=np.float32)
    assert np.array_equal(got.numpy(), np.repeat(want[:, None], 16, 1), equal_nan=True)
    assert np.isnan(want).sum() == 2


def test_every_code_times_every_scale_is_exact():
    codes = torch.arange(16, dtype=torch.uint8).expand(0x7F, 16)
    scale = torch.arange(0x7F, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    got = nvfp4.dequantize(e2m1.pack(codes), scale, torch.tensor(1.0), torch.float32).double().numpy()
    want = np.outer(SCALES, np.concatenate([MAGNITUDES, -MAGNITUDES]))
    assert np.array_equal(got, want)
    assert np.array_equal(np.signbit(got), np.broadcast_to(np.arange(16) >= 8, got.shape))


def test_every_scale_byte_is_produced_with_its_ties_and_neighbours():
    """amax = 6 * midpoint of two scales: the even code; one float32 ulp away: the nearer one."""
    for i, midpoint in enumerate(SCALE_MIDPOINTS):
        tie = np.float32(6 * midpoint)
        assert tie == 6 * midpoint
        amax = torch.tensor([np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(1e9)), 6 * SCALES[i + 1]])
        w = torch.zeros(4, 16)
        w[:, 5] = amax
        got = nvfp4.quantize(w, "amax", torch.tensor(1.0))[1].view(torch.uint8).flatten().tolist()
        even = i if i % 2 == 0 else i + 1
        assert got == [max(i, 1), max(even, 1), i + 1, i + 1], (i, midpoint)


@pytest.mark.parametrize("sign", [1, -1])
def test_every_code_tie_under_every_scale(sign):
    """x = midpoint * scale is exact in bfloat16: ties happen in real weights, and go to the even code, for all 126 scales."""
    for byte in range(1, 0x7F):
        scale = np.float32(SCALES[byte])
        ties = (MIDPOINTS * scale).astype(np.float32)
        assert (ties == MIDPOINTS * SCALES[byte]).all()
        row = np.concatenate([[6 * scale], ties, np.zeros(8)]).astype(np.float32)
        down, up = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))
        w = sign * torch.from_numpy(np.stack([row, np.concatenate([row[:1], down, row[8:]]), np.concatenate([row[:1], up, row[8:]])]).astype(np.float32))
        qdata, got, _ = nvfp4.quantize(w, "amax", torch.tensor(1.0))
        assert got.view(torch.uint8).flatten().tolist() == [byte] * 3
        codes = e2m1.unpack(qdata)[:, :8] & 7
        assert codes.tolist() == [[7, 0, 2, 2, 4, 4, 6, 6], [7, 0, 1, 2, 3, 4, 5, 6], [7, 1, 2, 3, 4, 5, 6, 7]], byte


# --- the searches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (37, 80), (3, 5, 48), (2, 3, 4, 32)])
def test_search_equals_reference(search, dtype, shape):
    w = torch.randn(shape) * torch.exp2(torch.randint(-3, 3, (*shape[:-1], shape[-1] // 16, 1)).float()).expand(*shape[:-1], -1, 16).flatten(-2)
    check_against_reference(w.to(dtype), search)


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
def test_search_equals_reference_where_ties_abound(search):
    """Small integers under an exact global scale: many exact ties of codes, scales and errors, all exact in float32."""
    w = torch.randint(-13, 14, (64, 96)).float()
    qdata, scale, _ = nvfp4.quantize(w, search, torch.tensor(1.0))
    x = w.double().numpy().reshape(64, 6, 16)
    choices = candidates(x, search)
    order = np.stack([error(x, c) for c in choices]).argmin(0)
    best = np.take_along_axis(np.stack(choices), order[None], 0)[0]
    assert np.array_equal(scale.view(torch.uint8).numpy(), best)
    assert np.array_equal(e2m1.unpack(qdata).numpy().reshape(x.shape), element_codes(x, SCALES[best]))


def test_activation_search_weights_the_channels():
    w, weight = torch.randn(24, 64), torch.rand(64) * 10 + 0.1
    check_against_reference(w, "activation", channel_weight=weight)
    plain, weighted = nvfp4.quantize(w, "mse"), nvfp4.quantize(w, "activation", channel_weight=weight)
    errors_ = [((nvfp4.dequantize(*q, torch.float32) - w).square() * weight).sum() for q in (plain, weighted)]
    assert errors_[1] < errors_[0]
    assert torch.equal(nvfp4.quantize(w, "activation", channel_weight=torch.ones(64))[0], plain[0])


def test_activation_search_goes_down_all_seven_codes():
    """An outlier in a channel that hardly matters is clipped; without weights that never pays."""
    w, weight = torch.rand(400, 16) * 2 - 1, torch.ones(16)
    w[:, 3], weight[3] = 4.0, 1e-3
    check_against_reference(w, "activation", channel_weight=weight)
    steps = [nvfp4.quantize(w, s, torch.tensor(2.0**-6), weight)[1].view(torch.uint8).int() for s in ("activation", "amax")]
    assert (steps[0] - steps[1]).min() == -7


def test_equal_errors_keep_the_earlier_candidate():
    one_hot = torch.zeros(1, 16)
    one_hot[0, 3] = 12.0  # 6 * 2.0 and 4 * 3.0 are both exact
    assert nvfp4.quantize(one_hot, "four_over_six", torch.tensor(1.0))[1].item() == 2.0
    one_hot[0, 3] = 8 * 2.0**-9  # base code 1 (6 units) is inexact; codes 2, 4 and 8 are exact
    assert nvfp4.quantize(one_hot, "mse", torch.tensor(1.0))[1].view(torch.uint8).item() == 2


def test_gaussian_errors_are_the_recorded_ones_and_ordered():
    w = torch.randn(512, 1024)
    amax, four_over_six, mse = (float((nvfp4.dequantize(*nvfp4.quantize(w, s), torch.float32) - w).norm() / w.norm()) for s in ("amax", "four_over_six", "mse"))
    assert amax < 0.098
    assert amax > four_over_six > mse
    assert (amax, four_over_six, mse) == pytest.approx((0.0951, 0.0870, 0.0812), rel=0.03)


# --- global scale -----------------------------------------------------------------------------------------------


def test_global_scale_multiplies_and_is_amax_over_2688():
    w = torch.randn(8, 32)
    qdata, scale, g = nvfp4.quantize(w)
    assert g == w.abs().max() / 2688
    assert torch.equal(nvfp4.dequantize(qdata, scale, g * 4, torch.float32), 4 * nvfp4.dequantize(qdata, scale, g, torch.float32))


def test_shared_global_scale_gives_the_bytes_of_the_fused_weight():
    q, k, v = torch.randn(3, 16, 64) * torch.tensor([1.0, 0.1, 7.0])[:, None, None]
    for search in ("amax", "four_over_six", "mse"):
        fused = nvfp4.quantize(torch.cat([q, k, v]), search)
        apart = [nvfp4.quantize(w, search, fused[2]) for w in (q, k, v)]
        assert torch.equal(torch.cat([a[0] for a in apart]), fused[0])
        assert torch.equal(torch.cat([a[1].view(torch.uint8) for a in apart]), fused[1].view(torch.uint8))
        assert all(torch.equal(a[2], fused[2]) for a in apart)


def test_experts_are_quantized_independently():
    w = torch.randn(4, 8, 32) * torch.tensor([1e-3, 1.0, 50.0, 0.0])[:, None, None]
    for search in ("amax", "four_over_six", "mse"):
        together = nvfp4.quantize(w, search)
        for e in range(4):
            alone = nvfp4.quantize(w[e], search)
            assert all(torch.equal(a.view(torch.uint8), t[e].view(torch.uint8)) for a, t in zip(alone[:2], together[:2], strict=True))
            assert torch.equal(alone[2], together[2][e])
        assert torch.equal(nvfp4.quantize(w, search, together[2].view(4, 1, 1))[0], together[0])


def test_given_global_scale_forms():
    w = torch.randn(4, 16)
    for shape in ((), (1,), (1, 1)):
        assert nvfp4.quantize(w, "amax", torch.full(shape, 0.25))[2].shape == ()


# --- views, emptiness, idempotence ------------------------------------------------------------------------------


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
def test_views_give_the_bytes_of_the_copy_and_are_not_modified(search):
    big = torch.randn(40, 96)
    for view in (big[:, 16:48], big[3:9], big[::2], big.t()[:, :32], big.view(4, 10, 96)[:, 1::3], big[:, ::3]):
        before = view.clone()
        for a, b in zip(nvfp4.quantize(view, search), nvfp4.quantize(view.contiguous(), search), strict=True):
            assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        assert torch.equal(view, before)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0), (0, 4, 16), (2, 0, 16), (2, 3, 0)])
@pytest.mark.parametrize("search", ["amax", "mse"])
def test_empty(shape, search):
    qdata, scale, g = nvfp4.quantize(torch.zeros(shape), search)
    *lead, n, k = shape
    assert (qdata.shape, scale.shape, g.shape) == ((*lead, n, k // 2), (*lead, n, k // 16), tuple(lead))
    assert nvfp4.dequantize(qdata, scale, g).shape == shape


def test_rows_beyond_one_chunk(monkeypatch):
    w = torch.randn(3, 7, 32)
    whole = nvfp4.quantize(w, "mse")
    monkeypatch.setattr(nvfp4, "_CHUNK", 64)
    assert len(list(nvfp4.row_chunks(21, 32))) == 11
    for a, b in zip(nvfp4.quantize(w, "mse"), whole, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.sampled_from(DTYPES))
def test_quantize_of_dequantize_is_idempotent_for_amax(seed, exponent, dtype):
    """Where a block's scale is normal its maximum is code 7, so requantizing finds the same scale and codes."""
    generator = torch.Generator().manual_seed(seed)
    w = (torch.randn(6, 48, generator=generator) * 2.0 ** (exponent if dtype != torch.float16 else exponent % 8)).to(dtype)
    qdata, scale, g = nvfp4.quantize(w)
    full = (e2m1.unpack(qdata).view(6, 3, 16) & 7).amax(-1) == 7
    assert full.any()
    again = nvfp4.quantize(nvfp4.dequantize(qdata, scale, g, torch.float32), "amax", g)
    assert torch.equal(again[1].view(torch.uint8)[full], scale.view(torch.uint8)[full])
    assert torch.equal(again[0].view(6, 3, 8)[full], qdata.view(6, 3, 8)[full])


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("search", nvfp4.SCALE_SEARCHES)
def test_a_non_finite_weight_is_named_and_counted(bad, dtype, search):
    w = torch.randn(2, 4, 32, dtype=torch.float32).to(dtype)
    w[1, 2, 3] = bad
    before = w.clone()
    with pytest.raises(errors.NonFiniteError, match=r"1 of 256.*finite.*exclude"):
        nvfp4.quantize(w, search, channel_weight=torch.ones(32))
    assert torch.equal(w.view(torch.uint8), before.view(torch.uint8))


W = torch.zeros(4, 32)
REFUSED = {
    "dtype": (errors.DTypeError, r"float64.*bfloat16", lambda: nvfp4.quantize(W.double())),
    "integer": (errors.DTypeError, r"int32", lambda: nvfp4.quantize(W.int())),
    "k": (errors.ShapeError, r"\(4, 24\).*K % 16.*Pad", lambda: nvfp4.quantize(W[:, :24])),
    "vector": (errors.ShapeError, r"\(32,\).*dim >= 2", lambda: nvfp4.quantize(W[0])),
    "search": (errors.ConfigError, r"'best'.*four_over_six", lambda: nvfp4.quantize(W, "best")),
    "no channel weight": (errors.ConfigError, r"\[32\] float32.*calibration", lambda: nvfp4.quantize(W, "activation")),
    "channel shape": (errors.ShapeError, r"\(16,\).*\(32,\)", lambda: nvfp4.quantize(W, "activation", channel_weight=torch.ones(16))),
    "channel nan": (errors.NonFiniteError, r"32 bad of 32.*calibration", lambda: nvfp4.quantize(W, "activation", channel_weight=torch.full((32,), math.nan))),
    "channel negative": (errors.NonFiniteError, r"32 bad", lambda: nvfp4.quantize(W, "activation", channel_weight=-torch.ones(32))),
    "global shape": (errors.ShapeError, r"\(3,\).*\(\)", lambda: nvfp4.quantize(W, "amax", torch.ones(3))),
    "global transposed": (errors.ShapeError, r"\(3, 2\).*\(2, 3\)", lambda: nvfp4.quantize(torch.zeros(2, 3, 4, 16), "amax", torch.ones(3, 2))),
    "global zero": (errors.NonFiniteError, r"\[0.0\].*> 0.*reciprocal", lambda: nvfp4.quantize(W, "amax", torch.tensor(0.0))),
    "global nan": (errors.NonFiniteError, r"nan", lambda: nvfp4.quantize(W, "amax", torch.tensor(math.nan))),
    "global negative": (errors.NonFiniteError, r"-1.0", lambda: nvfp4.quantize(W, "amax", torch.tensor(-1.0))),
    "global device": (errors.DeviceError, r"meta.*cpu.*Move", lambda: nvfp4.quantize(W, "amax", torch.ones((), device="meta"))),
    "meta": (errors.DeviceError, r"\(4, 32\).*memory.*Load", lambda: nvfp4.quantize(W.to("meta"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error_class, message, call = REFUSED[case]
    with pytest.raises(error_class, match=message) as caught:
        call()
    assert isinstance(caught.value, errors.FP4Error)


QDATA, SCALE, G = nvfp4.quantize(torch.ones(4, 32))
MISMATCHED = {
    "qdata dtype": (errors.DTypeError, "qdata.*int8.*uint8", (QDATA.view(torch.int8), SCALE, G)),
    "scale dtype": (errors.DTypeError, "scale.*uint8.*float8_e4m3fn", (QDATA, SCALE.view(torch.uint8), G)),
    "global dtype": (errors.DTypeError, "global_scale.*bfloat16.*float32", (QDATA, SCALE, G.bfloat16())),
    "rows": (errors.ShapeError, r"qdata \(3, 16\), scale \(4, 2\)", (QDATA[:3], SCALE, G)),
    "blocks": (errors.ShapeError, r"scale \(4, 1\)", (QDATA, SCALE[:, :1], G)),
    "half a block": (errors.ShapeError, r"qdata \(4, 12\)", (QDATA[:, :12], SCALE[:, :1], G)),
    "vector": (errors.ShapeError, r"qdata \(16,\)", (QDATA[0], SCALE[0], G)),
    "scalar": (errors.ShapeError, r"qdata \(\)", (QDATA[0, 0], SCALE[0, 0], G)),
    "global shape": (errors.ShapeError, r"global_scale.*\(4,\)", (QDATA, SCALE, G.expand(4))),
    "device": (errors.DeviceError, r"scale meta.*one device.*\.to\(device\)", (QDATA, SCALE.to("meta"), G)),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_parts_that_do_not_belong_together(case):
    error_class, message, parts = MISMATCHED[case]
    with pytest.raises(error_class, match=message):
        nvfp4.check_parts(*parts)


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_gives_the_bytes_of_the_cpu(search, dtype):
    w = torch.randn(3, 33, 96).to(dtype)
    cpu, cuda = nvfp4.quantize(w, search), nvfp4.quantize(w.cuda(), search)
    for a, b in zip(cpu, cuda, strict=True):
        assert (a.view(torch.uint8) == b.cpu().view(torch.uint8)).float().mean() > 0.9999  # sums of squares may differ in order
    assert torch.equal(nvfp4.dequantize(*cpu), nvfp4.dequantize(*(t.cuda() for t in cpu)).cpu())


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_elements():
    rows, k = 2**16, 2**15 + 16
    assert rows * k > 2**31
    w = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    w[-1] = torch.randn(k)
    qdata, scale, g = nvfp4.quantize(w)
    assert torch.equal(qdata[-1:], nvfp4.quantize(w[-1:], "amax", g)[0])
    assert not qdata[:-1].any()
    assert torch.equal(nvfp4.dequantize(qdata[-1:], scale[-1:], g), nvfp4.dequantize(*nvfp4.quantize(w[-1:], "amax", g)))
