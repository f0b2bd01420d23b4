"""E2M1 ("FP4"): sign, two exponent bits, one mantissa bit. The one code table of this project.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3. Codes 0..7 are the magnitudes below, bit 3 is the sign,
so code 8 is -0. There is no Inf and no NaN: magnitudes above 6 saturate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-v for v in MAGNITUDES)
MAX = MAGNITUDES[-1]
_EXPONENT, _ONE = 0x7F800000, 0x3F800000  # of a float32: the bits of its exponent, and of 1.0


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache a constant table per device. A table made under FakeTensorMode or by a tracer is never kept: it would
    be handed to every later real call."""
    kept: dict[tuple, Tensor] = {}

    @functools.wraps(make)
    def get(*key):
        if torch.compiler.is_compiling():
            return make(*key)
        table = kept.get(key)
        if table is None:
            table = make(*key)
            if type(table) is Tensor and not torch.is_inference(table):
                kept[key] = table
        return table

    return get


@constant
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(VALUES, device=device, dtype=dtype)


def round_to_grid(x: Tensor) -> Tensor:
    """Nearest representable magnitude with the sign of ``x``; ties go to the even code, saturating at 6.

    Args:
        x: float32, any shape, finite.

    Returns:
        float32 of the same shape.
    """
    return round_magnitude_(x.abs()).copysign_(x)


def round_magnitude_(a: Tensor) -> Tensor:
    """:func:`round_to_grid` in place, for a contiguous float32 ``a >= 0``."""
    a.clamp_(max=MAX)
    # The grid's step is 1/2 below 2, 1 in [2, 4], 2 in [4, 6]: half the power of two below a, or 1/2. 2^22 times that power has
    # ulps of one step, so adding and subtracting it rounds to a multiple of the step, and to an even one at a tie, which is
    # exactly "ties to the even code".
    big = (a.view(torch.int32) & _EXPONENT).clamp_(min=_ONE).add_(22 << 23).view(torch.float32)
    return a.add_(big).sub_(big)


def encode(x: Tensor) -> Tensor:
    """float32 -> codes 0..15 as uint8, same shape. Round to nearest, ties to even code, saturating; -0 is code 8."""
    value = round_to_grid(x)
    a = value.abs()
    # 0, .5, 1, 1.5, 2 -> 0..4 ; 3, 4 -> 5, 6 ; 6 -> 7
    code = torch.where(a <= 2.0, a * 2.0, torch.where(a <= 4.0, a + 2.0, 7.0)).to(torch.uint8)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes 0..15 (uint8) -> values in ``dtype`` (float32, bfloat16 or float16: all exact)."""
    # int32 indices: a quarter of a gigabyte less per 2^26 weights than the int64 that [] would need.
    return _table(codes.device, dtype).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def pack(codes: Tensor) -> Tensor:
    """Codes ``[..., K]`` -> bytes ``[..., K/2]``; the even k is the low nibble. K must be even."""
    if codes.dtype != torch.uint8:
        raise DTypeError("E2M1 codes are packed from uint8", value=codes.dtype, limit=torch.uint8, remedy="encode() gives such codes.")
    if codes.shape[-1] % 2:
        raise ShapeError("the last dimension of E2M1 codes must be even", value=tuple(codes.shape), limit="[..., K] with K even", remedy="Pad K with code 0.")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes ``[..., K/2]`` -> codes ``[..., K]`` uint8."""
    if packed.dtype != torch.uint8:
        raise DTypeError("packed E2M1 is uint8", value=packed.dtype, limit=torch.uint8, remedy="Reinterpret bytes with .view(torch.uint8).")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@constant
def byte_pairs(device: torch.device) -> Tensor:
    """``[256]`` float64 whose 8 bytes are the two float32 values of that packed byte, low nibble first.

    One gather of this table decodes two weights (used by the CPU kernel).
    """
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    return decode(unpack(byte[:, None])).view(torch.float64).flatten()
