"""MXFP4: E2M1 codes, one E8M0 (power of two) scale per 32 consecutive k, no global scale.

    value[n, k] = e2m1(code[n, k]) * 2 ** (scale[n, k // 32] - 127)

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 6.3 (conversion with the floor exponent).
Scale byte 255 is NaN and is never produced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError, NonFiniteError, ShapeError
from . import e2m1
from .nvfp4 import HIGH_PRECISION

NAME = "mxfp4"
GROUP = 32
BIAS = 127
SCALE_NAN = 255
EMAX = 2  # exponent of the largest E2M1 magnitude: 6 = 1.5 * 2^2
BITS_PER_WEIGHT = 4 + 8 / GROUP


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``w`` to MXFP4 by the OCP rule: scale = 2 ** (floor(log2(amax)) - 2), codes saturate.

    Args:
        w: ``[..., N, K]`` bfloat16, float16 or float32, finite; K a multiple of 32.

    Returns:
        ``(qdata uint8 [..., N, K/2], scale uint8 [..., N, K/32])``.
    """
    if w.dtype not in HIGH_PRECISION:
        raise DTypeError("MXFP4 is quantized from a high-precision weight", value=w.dtype, limit=list(HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    if w.dim() < 2 or w.shape[-1] % GROUP:
        raise ShapeError("MXFP4 needs [..., N, K] with K a multiple of 32", value=tuple(w.shape), limit="K % 32 == 0", remedy="Pad K with zeros.")
    blocks = w.float().unflatten(-1, (-1, GROUP))
    amax = blocks.abs().amax(-1)
    if not torch.isfinite(amax).all():
        raise NonFiniteError(
            "a weight holds NaN or Inf",
            value=f"{int((~torch.isfinite(w)).sum())} of {w.numel()} elements",
            limit="finite values",
            remedy="Repair or exclude this weight.",
        )
    # frexp: amax = m * 2**e with m in [0.5, 1), so floor(log2(amax)) = e - 1, subnormals included.
    exponent = torch.frexp(amax).exponent - 1 - EMAX
    byte = torch.where(amax > 0, exponent + BIAS, torch.zeros_like(exponent)).clamp(0, SCALE_NAN - 1)
    # ldexp by at most 2 * 126 in two steps, so that neither factor overflows float32.
    shift = BIAS - byte
    half = torch.div(shift, 2, rounding_mode="floor")
    scaled = torch.ldexp(torch.ldexp(blocks, half.unsqueeze(-1)), (shift - half).unsqueeze(-1))
    return e2m1.pack(e2m1.encode(scaled).flatten(-2)), byte.to(torch.uint8)


def scale_value(scale: Tensor) -> Tensor:
    """E8M0 bytes -> float32 powers of two; byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    value = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.int32) - BIAS)
    return torch.where(scale == SCALE_NAN, torch.full_like(value, float("nan")), value)


def dequantize(qdata: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[..., N, K]`` in ``dtype`` from uint8 ``[..., N, K/2]`` codes and uint8 ``[..., N, K/32]`` scales."""
    values = e2m1.decode(e2m1.unpack(qdata)).unflatten(-1, (-1, GROUP))
    return (values * scale_value(scale).unsqueeze(-1)).flatten(-2).to(dtype)


# Powers of two that E4M3 holds: 2**8 down to the subnormal 2**-9.
_E4M3_TOP, _E4M3_BOTTOM = 8, -9
# The global scale stays a normal float32, and 448 * 6 times it finite.
_GLOBAL_BOTTOM, _GLOBAL_TOP = -126, 115


def to_nvfp4(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same values as NVFP4: the codes as they are, each exponent twice as an E4M3 power of two below a power-of-two global scale.

    Lossless if and only if, in every matrix, the exponents of the blocks that hold anything but zeros span at most 17
    (E4M3 has the 18 powers of two 2**-9 .. 2**8) and the global scale that brings them there lies in 2**-126 .. 2**115.

    Args:
        qdata: uint8 ``[..., N, K/2]``.
        scale: uint8 ``[..., N, K/32]``, no byte 255.

    Returns:
        ``(qdata, scale float8_e4m3fn [..., N, K/16], global_scale float32 [...])``, or None if a matrix cannot be held without loss.
    """
    exponent = scale.to(torch.int16) - BIAS
    blocks = qdata.unflatten(-1, (-1, GROUP // 2)) if qdata.numel() else qdata.new_zeros((*scale.shape, GROUP // 2))
    used = (blocks & 0x77 != 0).any(-1)
    lead = scale.shape[:-2]
    flat, mask = exponent.reshape(*lead, -1), used.reshape(*lead, -1)
    if flat.shape[-1] == 0:
        return qdata, scale.new_zeros((*scale.shape[:-1], 0)).view(torch.float8_e4m3fn), torch.ones(lead, device=scale.device)
    low = torch.where(mask, flat, torch.full_like(flat, 1 << 10)).amin(-1)
    high = torch.where(mask, flat, torch.full_like(flat, -(1 << 10))).amax(-1)
    empty = low > high
    shift = torch.where(empty, torch.zeros_like(high), (high - _E4M3_TOP).clamp_min(_GLOBAL_BOTTOM))
    fits = empty | ((low - shift >= _E4M3_BOTTOM) & (shift <= _GLOBAL_TOP))
    if not bool(fits.all()):
        return None
    k = (exponent - shift[..., None, None]).clamp(_E4M3_BOTTOM, _E4M3_TOP)
    power = torch.where(used, torch.ldexp(torch.ones_like(k, dtype=torch.float32), k.to(torch.int32)), torch.zeros_like(k, dtype=torch.float32))
    e4m3 = power.to(torch.float8_e4m3fn).view(torch.uint8).repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
    return qdata, e4m3, torch.ldexp(torch.ones(lead, dtype=torch.float32, device=scale.device), shift.to(torch.int32))
