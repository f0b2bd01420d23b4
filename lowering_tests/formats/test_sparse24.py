"""2:4-sparse NVFP4: layout against a reference written with loops, metadata, masks, scales over what is kept."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_inductor.errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError, SparsityError
from fp4_inductor.formats import e2m1, nvfp4, sparse24

LEGAL = {4, 8, 12, 9, 13, 14}  # pos0 | pos1 << 2 with pos0 < pos1
SEARCHES = nvfp4.SCALE_SEARCHES


def loops(w: torch.Tensor) -> torch.Tensor:
    """The magnitude mask, group by group."""
    mask = torch.zeros(w.shape, dtype=torch.bool)
    for i in range(0, w.shape[1], 4):
        for r in range(w.shape[0]):
            order = sorted(range(4), key=lambda j: (-abs(float(w[r, i + j])), j))
            for j in order[:2]:
                mask[r, i + j] = True
    return mask


def random_mask(*shape: int) -> torch.Tensor:
    return sparse24.mask_of_scores(torch.rand(shape))


def test_layout_against_loops():
    w = torch.randn(5, 64)
    mask = loops(w)
    values, meta, scale, g = sparse24.quantize_sparse24(w, mask)
    assert values.shape == (5, 16) and meta.shape == (5, 8) and scale.shape == (5, 4) and g.shape == ()
    dense = nvfp4.quantize(torch.where(mask, w, 0.0))
    assert torch.equal(scale.view(torch.uint8), dense[1].view(torch.uint8)) and torch.equal(g, dense[2])
    codes = e2m1.unpack(dense[0])
    for r, group in itertools.product(range(5), range(16)):
        pos = [j for j in range(4) if mask[r, group * 4 + j]]
        kept = [int(codes[r, group * 4 + j]) for j in pos]
        assert int(values[r, group]) == kept[0] | kept[1] << 4
        byte = int(meta[r, group // 2])
        assert (byte >> 4 * (group % 2)) & 15 == pos[0] | pos[1] << 2


def test_magnitude_mask_against_loops_with_ties():
    w = torch.randint(-2, 3, (40, 64)).float()
    assert torch.equal(sparse24.magnitude_mask(w), loops(w))
    assert torch.equal(sparse24.magnitude_mask(w.reshape(4, 10, 64)), loops(w).reshape(4, 10, 64))


@pytest.mark.parametrize(
    ("row", "kept"),
    [([1, 1, 1, 1], [0, 1]), ([0, 0, 0, 0], [0, 1]), ([0, 0, 0, -3], [0, 3]), ([0, -0.0, 2, 0], [0, 2]), ([1, -2, 2, 2], [1, 2])],
)
def test_ties_and_short_groups_keep_the_lower_index(row, kept):
    w = torch.tensor(row, dtype=torch.float32).repeat(8)[None]
    assert sparse24.magnitude_mask(w)[0, :4].nonzero().flatten().tolist() == kept
    if sum(v != 0 for v in row) <= 2:
        assert sparse24.existing_mask(w)[0, :4].nonzero().flatten().tolist() == kept


def test_validation_of_all_256_bytes():
    for byte in range(256):
        meta = torch.full((3, 4), 0x44, dtype=torch.uint8)
        meta[1, 2] = byte
        if {byte & 15, byte >> 4} <= LEGAL:
            sparse24.validate_meta(meta)
        else:
            with pytest.raises(SparsityError, match=rf"1 of 12 bytes, the first 0x{byte:02X} at \(1, 2\)"):
                sparse24.validate_meta(meta)
    sparse24.validate_meta(torch.empty(0, 4, dtype=torch.uint8))
    with pytest.raises(DTypeError):
        sparse24.validate_meta(torch.zeros(2, 4, dtype=torch.int8))
    with pytest.raises(DeviceError):
        sparse24.validate_meta(torch.zeros(2, 4, dtype=torch.uint8, device="meta"))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), lead=st.sampled_from([(), (1,), (3,), (2, 2)]), n=st.integers(0, 5), blocks=st.integers(1, 3))
def test_any_codes_and_any_pattern_round_trip(seed, lead, n, blocks):
    gen = torch.Generator().manual_seed(seed)
    k = 32 * blocks
    mask = sparse24.mask_of_scores(torch.rand((*lead, n, k), generator=gen))
    codes = torch.randint(0, 16, (*lead, n, k), generator=gen, dtype=torch.uint8)
    qdata = e2m1.pack(torch.where(mask, codes, 0))
    values, meta = sparse24.compress(qdata, mask)
    sparse24.validate_meta(meta)
    assert torch.equal(sparse24.mask_of(meta), mask)
    assert torch.equal(sparse24.decompress(values, meta), qdata)
    # Without the mask the positions may differ in groups that hold zeros; the codes do not.
    again = sparse24.compress(qdata)
    sparse24.validate_meta(again[1])
    assert torch.equal(sparse24.decompress(*again), qdata)


def test_all_six_patterns_and_all_256_values():
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8).repeat_interleave(256).repeat(2, 1)
    values = torch.arange(256, dtype=torch.uint8).repeat(6).repeat(2, 1)
    meta = sparse24.pack_meta(nibble)
    sparse24.validate_meta(meta)
    dense = e2m1.unpack(sparse24.decompress(values, meta)).reshape(2, 6, 256, 4)
    for i, (p0, p1) in enumerate(sparse24.PATTERNS):
        assert torch.equal(dense[0, i, :, p0], torch.arange(256).to(torch.uint8) & 15)
        assert torch.equal(dense[0, i, :, p1], torch.arange(256).to(torch.uint8) >> 4)
        assert int(dense[0, i].count_nonzero(-1).max()) == 2
    assert all(torch.equal(a, b) for a, b in zip(sparse24.compress(sparse24.decompress(values, meta), sparse24.mask_of(meta)), (values, meta), strict=True))


@pytest.mark.parametrize("search", SEARCHES)
def test_scales_are_fitted_to_what_is_kept(search):
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    mask = sparse24.mask_of_scores(-w.abs())  # keep the small ones: the dropped would dominate every maximum
    weight = torch.rand(128) if search == "activation" else None
    parts = sparse24.quantize_sparse24(w, mask, search, channel_weight=weight)
    dense = nvfp4.quantize(torch.where(mask, w, 0.0), search, channel_weight=weight)
    for dtype in nvfp4.HIGH_PRECISION:
        assert torch.equal(sparse24.dequantize_sparse24(*parts, dtype), nvfp4.dequantize(*dense, dtype))
    error = ((sparse24.dequantize_sparse24(*parts, torch.float32) - w)[mask]).norm() / w[mask].norm()
    assert float(error) < 0.1
    whole = nvfp4.quantize(w, search, channel_weight=weight)
    assert float(((nvfp4.dequantize(*whole, torch.float32) - w)[mask]).norm() / w[mask].norm()) > 1.3 * float(error)


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
@pytest.mark.parametrize("shape", [(8, 32), (3, 5, 64), (1, 96), (0, 32), (2, 0, 32)])
def test_shapes_and_dtypes(shape, dtype):
    w = torch.randn(shape).to(dtype)
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    sparse24.check_parts(*parts)
    out = sparse24.dequantize_sparse24(*parts, dtype)
    assert out.shape == shape and out.dtype == dtype
    # What is dequantised is 2:4, and stays what it is.
    again = sparse24.quantize_sparse24(out, None, "amax", parts.global_scale)
    assert torch.equal(sparse24.dequantize_sparse24(*again, dtype), out)
    for e in range(shape[0]) if len(shape) == 3 else ():
        one = sparse24.quantize_sparse24(w[e], sparse24.magnitude_mask(w[e]))
        assert torch.equal(one.values, parts.values[e]) and torch.equal(one.meta, parts.meta[e])


def test_zero_rows_and_groups_are_exact():
    w = torch.randn(4, 64)
    w[1] = 0
    w[2, 16:32] = 0
    w[3, 3:] = 0
    w[3, 0] = 0
    w = w * sparse24.magnitude_mask(w)
    parts = sparse24.quantize_sparse24(w)
    out = sparse24.dequantize_sparse24(*parts, torch.float32)
    assert torch.isfinite(out).all() and not out[1].any() and not out[2, 16:32].any() and not out[3, 3:].any()
    assert out[3, 1] != 0 and parts.scale[1].float().abs().max() == 0


def test_a_given_global_scale_is_kept():
    w = torch.randn(2, 8, 32)
    g = torch.tensor([0.01, 0.02])
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w), "mse", global_scale=g)
    assert torch.equal(parts.global_scale, g)


def test_a_weight_that_is_not_24_names_the_first_group():
    w = torch.zeros(6, 64)
    w[4, 8:11] = 1.0
    w[5, 0:4] = 1.0
    assert not sparse24.is_24(w) and sparse24.is_24(w[:4])
    with pytest.raises(SparsityError, match=r"2 of 96 groups of four; the first: row 4, k 8\.\.11 with 3 non-zeros.*at most 2.*magnitude"):
        sparse24.quantize_sparse24(w)
    with pytest.raises(SparsityError, match=r"row \(1, 1\), k 8\.\.11 with 3"):
        sparse24.existing_mask(w.reshape(2, 3, 64))
    with pytest.raises(SparsityError, match="exactly 2"):
        sparse24.quantize_sparse24(w, w != 0)
    with pytest.raises(SparsityError, match="codes are not 2:4"):
        sparse24.compress(nvfp4.quantize(w)[0])
    with pytest.raises(SparsityError, match="more than two"):
        sparse24.complete_mask(w != 0)
    assert torch.equal(sparse24.complete_mask((w != 0)[:4]), sparse24.existing_mask(w[:4]))


def test_bad_input():
    w = torch.randn(4, 64)
    mask = sparse24.magnitude_mask(w)
    for shape in ((4, 48), (4, 16), (32,), (4, 8)):
        with pytest.raises(ShapeError):
            sparse24.quantize_sparse24(torch.zeros(shape))
    with pytest.raises(DTypeError):
        sparse24.quantize_sparse24(w.double(), mask)
    with pytest.raises(DTypeError):
        sparse24.quantize_sparse24(w, mask.float())
    with pytest.raises(ShapeError):
        sparse24.quantize_sparse24(w, mask[:3])
    with pytest.raises(ConfigError):
        sparse24.quantize_sparse24(w, mask, "best")
    with pytest.raises(ConfigError):
        sparse24.quantize_sparse24(w, mask, "activation")
    with pytest.raises(DeviceError):
        sparse24.quantize_sparse24(w.to("meta"))
    for bad in (float("nan"), float("inf")):
        broken = w.clone()
        broken[2, int((~mask[2]).nonzero()[0])] = bad  # a dropped one: it is not repaired by dropping it
        with pytest.raises(NonFiniteError):
            sparse24.quantize_sparse24(broken, mask)
        with pytest.raises(NonFiniteError):
            sparse24.magnitude_mask(broken)
    values, meta, scale, g = sparse24.quantize_sparse24(w, mask)
    for parts, error in (
        ((values[:, :-1], meta, scale, g), ShapeError),
        ((values, meta[:, :-1], scale, g), ShapeError),
        ((values, meta, scale[:-1], g), ShapeError),
        ((values, meta, scale, g[None]), ShapeError),
        ((values[:, :4], meta[:, :2], scale[:, :1], g), ShapeError),
        ((values.view(torch.int8), meta, scale, g), DTypeError),
        ((values, meta.short(), scale, g), DTypeError),
        ((values, meta, scale.view(torch.uint8), g), DTypeError),
        ((values, meta, scale, g.double()), DTypeError),
        ((values, meta.to("meta"), scale, g), DeviceError),
    ):
        with pytest.raises(error):
            sparse24.check_parts(*parts)
    sparse24.check_parts(values, meta, scale, g)


def test_bits_per_weight():
    w = torch.randn(64, 256)
    parts = sparse24.quantize_sparse24(w, random_mask(64, 256))
    bits = 8 * sum(t.numel() * t.element_size() for t in parts[:3]) / w.numel()
    assert bits == sparse24.BITS_PER_WEIGHT == 3.5
