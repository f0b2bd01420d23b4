"""``fp4.quantize_rows_fp8(x [M, K], lane_order) -> (float8_e4m3fn [M, K], float32 [M, 1])``: activations of the FP8 path, per token.

``lane_order``: each 256 k of a row in the order in which the kernel that rounds a dense weight in registers takes them (:func:`in_lane_order`).

A compiled graph never calls this op: the lowering writes the same arithmetic in plain operations, which Inductor fuses
with whatever produced ``x`` (``lowerings/quantize_rows.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract

E4M3_MAX = 448.0
TINY = torch.finfo(torch.float32).tiny


# The order of each 256 k: (numbers, distance in memory) of the digits of k, the highest first.
LANE_ORDER = ((4, 4), (16, 16), (4, 1))
STEP = math.prod(count for count, _ in LANE_ORDER)


def in_lane_order(x: Tensor) -> Tensor:
    """``[M, K]``, K a multiple of 256, in memory of its own: position 16 c + 4 t + e of each 256 holds k = 64 t + 4 c + e.

    A lane t of four then finds k = 64 t .. 64 t + 63 of a weight side by side, where an MMA of 32 k asks it for four k of each 16.
    """
    out = torch.empty_like(x)
    digits, distances = zip(*LANE_ORDER, strict=True)
    shape = (x.shape[0], x.shape[1] // STEP, *digits)
    out.as_strided(shape, (x.shape[1], STEP, *distances)).copy_(x.view(shape))
    return out


def reference(x: Tensor, lane_order: bool = False) -> tuple[Tensor, Tensor]:
    """scale = amax(|row|) / 448 (1 for a zero row, never subnormal: 0 / 0 would be NaN); x8 = e4m3(x * (1 / scale))."""
    check(x, lane_order)
    rows = x.float()
    amax = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(TINY), 1.0)
    # Rounding may lift the product a hair above 448, which E4M3 would turn into NaN.
    x8 = (rows * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return in_lane_order(x8) if lane_order else x8, scale


def check(x: Tensor, lane_order: bool = False) -> None:
    if x.dim() != 2:
        raise ShapeError("fp4.quantize_rows_fp8 takes [M, K]", value=tuple(x.shape), limit="two dimensions", remedy="Flatten the leading ones.")
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("fp4.quantize_rows_fp8: activation dtype", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    check_order(x.shape[1], lane_order)


def check_order(k: int, lane_order: bool) -> None:
    """``k``: of the codes."""
    if lane_order and k % STEP:
        raise ShapeError("E4M3 activations: lane_order", value=f"K = {k}", limit=f"a multiple of {STEP}", remedy="Leave lane_order away.")


def fake(x: Tensor, lane_order: bool = False) -> tuple[Tensor, Tensor]:
    check(x, lane_order)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for m, k in ((4, 32), (1, 16), (3, 48), (0, 16), (17, 80), (33, 16), (2, 272), (64, 128)):
        yield f"{(m, k)}", (torch.randn(m, k, device=device).to(torch.bfloat16),)
    yield "lane order", (torch.randn(3, 2 * STEP, device=device).to(torch.bfloat16), True)


CONTRACT = OpContract(
    name="quantize_rows_fp8",
    schema="(Tensor x, bool lane_order=False) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float8_e4m3fn: 0.0},
)
# Elementwise operations keep the strides of a transposed x; the fake promises row-major.
CONTRACT.implement("CPU", lambda x, lane_order=False: reference(x.contiguous(), lane_order))
