"""``fp4.quantize_rows_fp8(x [M, K]) -> (float8_e4m3fn [M, K], float32 [M, 1])``: activations of the FP8 path, per token.

A compiled graph never calls this op: the lowering writes the same arithmetic in plain operations, which Inductor fuses
with whatever produced ``x`` (``lowerings/quantize_rows.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract

E4M3_MAX = 448.0
TINY = torch.finfo(torch.float32).tiny


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = amax(|row|) / 448 (1 for a zero row, never subnormal: 0 / 0 would be NaN); x8 = e4m3(x * (1 / scale))."""
    check(x)
    rows = x.float()
    amax = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(TINY), 1.0)
    # Rounding may lift the product a hair above 448, which E4M3 would turn into NaN.
    return (rows * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def check(x: Tensor) -> None:
    if x.dim() != 2:
        raise ShapeError("fp4.quantize_rows_fp8 takes [M, K]", value=tuple(x.shape), limit="two dimensions", remedy="Flatten the leading ones.")
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("fp4.quantize_rows_fp8: activation dtype", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")


def fake(x: Tensor) -> tuple[Tensor, Tensor]:
    check(x)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for m, k in ((4, 32), (1, 16), (3, 48), (0, 16), (17, 80), (33, 16), (2, 272), (64, 128)):
        yield f"{(m, k)}", (torch.randn(m, k, device=device).to(torch.bfloat16),)


CONTRACT = OpContract(
    name="quantize_rows_fp8",
    schema="(Tensor x) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float8_e4m3fn: 0.0},
)
# Elementwise operations keep the strides of a transposed x; the fake promises row-major.
CONTRACT.implement("CPU", lambda x: reference(x.contiguous()))
