"""E2M1 against a table written out by hand (OCP MX v1.0, section 5.3.3)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_inductor import errors
from fp4_inductor.formats import e2m1

# code -> value, written out; the sign of zero matters.
TABLE = {
    0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0,
    0b1000: -0.0, 0b1001: -0.5, 0b1010: -1.0, 0b1011: -1.5, 0b1100: -2.0, 0b1101: -3.0, 0b1110: -4.0, 0b1111: -6.0,
}  # fmt: skip
# midpoint -> (code just below, code of the tie, code just above): the tie goes to the even code
TIES = {0.25: (0, 0, 1), 0.75: (1, 2, 2), 1.25: (2, 2, 3), 1.75: (3, 4, 4), 2.5: (4, 4, 5), 3.5: (5, 6, 6), 5.0: (6, 6, 7)}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def encode(*values: float) -> list[int]:
    return e2m1.encode(torch.tensor(values, dtype=torch.float32)).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_code_decodes_to_the_table(dtype):
    got = e2m1.decode(torch.arange(16, dtype=torch.uint8), dtype)
    assert got.dtype == dtype
    assert [(v, math.copysign(1, v)) for v in got.tolist()] == [(TABLE[c], math.copysign(1, TABLE[c])) for c in range(16)]


def test_every_value_encodes_to_its_code():
    assert encode(*(TABLE[c] for c in range(16))) == list(range(16))


@pytest.mark.parametrize("tie", TIES)
def test_ties_and_their_neighbours(tie):
    below, at, above = TIES[tie]
    down, up = float(np.nextafter(np.float32(tie), np.float32(0))), float(np.nextafter(np.float32(tie), np.float32(9)))
    assert encode(down, tie, up) == [below, at, above]
    assert encode(-down, -tie, -up) == [below | 8, at | 8, above | 8]


def test_saturation_and_the_smallest_numbers():
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal * 2**-23
    assert encode(6.0, 7.0, 1e30, largest, math.inf) == [7] * 5
    assert encode(-6.5, -largest, -math.inf) == [15] * 3
    assert encode(0.0, -0.0, smallest, -smallest) == [0, 8, 0, 8]


def test_round_to_grid_is_decode_of_encode():
    x = torch.linspace(-8, 8, 4097)
    want = e2m1.decode(e2m1.encode(x))
    assert torch.equal(e2m1.round_to_grid(x).view(torch.int32), want.view(torch.int32))


def test_all_bytes_unpack_and_pack():
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = e2m1.unpack(byte)
    assert codes.tolist() == [[b % 16, b // 16] for b in range(256)]
    assert torch.equal(e2m1.pack(codes), byte)


def test_byte_pairs_hold_two_floats_low_nibble_first():
    pairs = e2m1.byte_pairs(torch.device("cpu")).view(torch.float32).view(256, 2)
    assert pairs.tolist() == [[TABLE[b % 16], TABLE[b // 16]] for b in range(256)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(0, 9), st.data())
def test_pack_and_unpack_are_inverse(lead, half, data):
    shape = (*lead, 2 * half)
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 15), min_size=math.prod(shape), max_size=math.prod(shape))), dtype=torch.uint8).view(shape)
    packed = e2m1.pack(codes)
    assert packed.shape == (*lead, half)
    assert torch.equal(e2m1.unpack(packed), codes)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_pack_of_a_strided_view_equals_the_copy():
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    for view in (codes[:, 8:40], codes[::2], codes.t(), codes[:, ::4]):
        assert torch.equal(e2m1.pack(view), e2m1.pack(view.contiguous()))


def test_bad_input_is_typed():
    with pytest.raises(errors.ShapeError, match=r"even.*\(3,\)"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(errors.DTypeError, match="int32"):
        e2m1.pack(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(errors.DTypeError, match="int8"):
        e2m1.unpack(torch.zeros(4, dtype=torch.int8))


def test_a_table_made_under_fake_tensor_mode_is_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    # float64 is used by nobody else, so the first table of this key would be the fake one.
    with FakeTensorMode():
        assert e2m1.decode(torch.zeros(4, dtype=torch.uint8), torch.float64).shape == (4,)
    assert e2m1.decode(torch.tensor([7], dtype=torch.uint8), torch.float64).tolist() == [6.0]
