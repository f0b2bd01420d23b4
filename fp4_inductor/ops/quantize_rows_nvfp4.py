"""``fp4.quantize_rows_nvfp4(x [M, K], row_scale [M, 1]) -> (uint8 [M, K/2], float8_e4m3fn [M, K/16])``: activations of the W4A4 path.

    x[m, k] ~ e2m1(code[m, k]) * scale[m, k // 16] * row_scale[m]

The format of the weights with a global scale per token: a token is rounded alike whoever shares its batch, and no
pass over the whole tensor comes first. On SmolLM2-135M it also loses less than one scale per tensor (KL 0.151 against
0.159 nats a token, weights in bfloat16).

:func:`row_scales` are plain operations: a compiled graph fuses that maximum with whatever produced ``x``, e.g. a norm
(``lowerings/quantize_rows.py``). The codes are a kernel's: 16 neighbours share a scale and two share a byte, and generated
code would read ``x`` once for the scales and again for the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError
from ..formats import e2m1, nvfp4
from .contract import OpContract

PER_UNIT = 1.0 / (e2m1.MAX * nvfp4.SCALE_MAX)
SMALLEST = 2.0**-117  # of a row scale: 1 / (row scale * the smallest block scale) stays finite in float32
_CHUNK = 1 << 18  # activations rounded at once: the temporaries stay in the cache, three times faster than in memory


def row_scales(x: Tensor) -> Tensor:
    """float32 ``[M, 1]``: amax(|row|) / 2688, so that the largest block scale of a row is E4M3's largest; 1 for a row of zeros.

    NaN for a row that holds NaN or Inf: what is multiplied by it is NaN.
    """
    peak = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).float() if x.shape[-1] else x.new_zeros((x.shape[0], 1), dtype=torch.float32)
    scale = torch.where(peak == 0, 1.0, (peak * PER_UNIT).clamp_min(SMALLEST))
    return torch.where(peak < torch.inf, scale, torch.nan)


def reference(x: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 steps, each IEEE's, so that every implementation has the same bits.

    scale = e4m3(amax(|block|) * (1 / (6 * row_scale))), saturating and never 0; code = e2m1(x * (1 / (scale * row_scale))). One
    reciprocal a block instead of a division an element: an exact tie may go to the other neighbour. A row whose scale is NaN
    becomes zeros.
    """
    check(x, row_scale)
    m, k = x.shape
    qdata = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(m, k // nvfp4.GROUP, dtype=nvfp4.SCALE_DTYPE, device=x.device)
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, m, step):
        part = slice(start, min(start + step, m))
        q, s = _rounded(x[part].float().contiguous(), row_scale[part])
        qdata[part], scale[part] = q, s
    return qdata, scale


def _rounded(x: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    usable = row_scale == row_scale
    r = torch.where(usable, row_scale, 1.0)
    blocks = torch.where(usable, x, 0.0).unflatten(-1, (-1, nvfp4.GROUP))
    one = torch.ones_like(r)
    wanted = blocks.abs().amax(-1) * (one / (r * e2m1.MAX)) if x.shape[-1] else x
    code = wanted.clamp(max=nvfp4.SCALE_MAX).to(nvfp4.SCALE_DTYPE).view(torch.uint8).clamp_min(1)
    s = code.view(nvfp4.SCALE_DTYPE)
    inverse = one / (s.float() * r)
    return e2m1.pack(e2m1.encode((blocks * inverse.unsqueeze(-1)).flatten(-2))), s


def dequantize(qdata: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
    """float32 ``[M, K]``: what the product sees."""
    return nvfp4.dequantize(qdata.unsqueeze(1), scale.unsqueeze(1), row_scale.flatten(), torch.float32).squeeze(1)


def check(x: Tensor, row_scale: Tensor) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    if x.dim() != 2 or x.shape[1] % nvfp4.GROUP:
        raise ShapeError(
            "fp4.quantize_rows_nvfp4 takes [M, K] with K a multiple of 16",
            value=tuple(x.shape),
            limit="two dimensions, K % 16 == 0",
            remedy="Flatten the leading ones and pad K with zeros, as FP4Linear does.",
        )
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("fp4.quantize_rows_nvfp4: activation dtype", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    if row_scale.dtype != torch.float32:
        raise DTypeError("fp4.quantize_rows_nvfp4: row_scale dtype", value=row_scale.dtype, limit=torch.float32, remedy="row_scales(x) gives it.")
    if row_scale.dim() != 2 or row_scale.shape[0] != x.shape[0] or row_scale.shape[1] != 1:
        raise ShapeError(
            "fp4.quantize_rows_nvfp4: row_scale does not fit", value=tuple(row_scale.shape), limit=f"({x.shape[0]}, 1)", remedy="row_scales(x) gives it."
        )
    if row_scale.device != x.device:
        raise DeviceError(
            "fp4.quantize_rows_nvfp4: tensors on different devices",
            value=f"x {x.device}, row_scale {row_scale.device}",
            limit="one device",
            remedy="Move it with .to(x.device).",
        )


def fake(x: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    check(x, row_scale)
    m, k = x.shape
    return x.new_empty((m, k // 2), dtype=torch.uint8), x.new_empty((m, k // nvfp4.GROUP), dtype=nvfp4.SCALE_DTYPE)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for i, (m, k) in enumerate(((4, 32), (1, 16), (3, 48), (0, 16), (17, 80), (33, 16), (2, 272), (64, 128))):
        x = torch.randn(m, k, device=device).to((torch.bfloat16, torch.float32)[i % 2])
        yield f"{(m, k)} {x.dtype}", (x, row_scales(x))


CONTRACT = OpContract(
    name="quantize_rows_nvfp4",
    schema="(Tensor x, Tensor row_scale) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.uint8: 0.0, nvfp4.SCALE_DTYPE: 0.0},
)
CONTRACT.implement("CPU", reference)
