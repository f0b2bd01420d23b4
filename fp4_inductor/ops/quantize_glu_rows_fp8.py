"""``fp4.quantize_glu_rows_fp8(gate_up [M, 2 I], act, lane_order) -> (float8_e4m3fn [M, I], float32 [M, 1])``: ``act(gate) * up``, rounded per token.

What stands between the two products of a gated MLP on the FP8 path: gate is the first half of each row, up the second. The product is
float32, rounded once, as ``fp4.quantize_rows_fp8`` rounds. Inductor's own kernel for it computes it twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from . import quantize_rows_fp8
from .contract import OpContract
from .linear_glu import ACTIVATIONS


def reference(gate_up: Tensor, act: str = "silu", lane_order: bool = False) -> tuple[Tensor, Tensor]:
    """float32 arithmetic up to the codes."""
    check(gate_up, act, lane_order)
    gate, up = gate_up.float().chunk(2, -1)
    return quantize_rows_fp8.reference(ACTIVATIONS[act](gate) * up, lane_order)


def check(gate_up: Tensor, act: str = "silu", lane_order: bool = False) -> None:
    """As ``fp4.quantize_rows_fp8``, two halves, and a known activation."""
    quantize_rows_fp8.check(gate_up)
    if gate_up.shape[1] % 2:
        raise ShapeError("fp4.quantize_glu_rows_fp8 takes gate and up", value=tuple(gate_up.shape), limit="[M, 2 I]", remedy="Concatenate them along K.")
    if act not in ACTIVATIONS:
        raise ConfigError("fp4.quantize_glu_rows_fp8: unknown activation", value=act, limit=list(ACTIVATIONS), remedy="Choose one of them.")
    quantize_rows_fp8.check_order(gate_up.shape[1] // 2, lane_order)


def fake(gate_up: Tensor, act: str = "silu", lane_order: bool = False) -> tuple[Tensor, Tensor]:
    check(gate_up, act, lane_order)
    m, n = gate_up.shape
    return gate_up.new_empty((m, n // 2), dtype=torch.float8_e4m3fn), gate_up.new_empty((m, 1), dtype=torch.float32)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for (m, n), act in zip(((4, 64), (1, 32), (3, 96), (0, 32), (17, 160), (33, 30), (2, 546), (6, 100)), (*ACTIVATIONS,) * 2, strict=False):
        yield f"{(m, n)} {act}", (torch.randn(m, n, device=device).to(torch.bfloat16), act)
    yield "lane order", (torch.randn(3, 1024, device=device).to(torch.bfloat16), "silu", True)


CONTRACT = OpContract(
    name="quantize_glu_rows_fp8",
    schema='(Tensor gate_up, str act="silu", bool lane_order=False) -> (Tensor, Tensor)',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # Codes that lie at the edge between two by another exp; dequantised against dequantised.
    tolerance={torch.float8_e4m3fn: 5e-3},
)
# Elementwise operations keep the strides of a transposed input; the fake promises row-major.
CONTRACT.implement("CPU", lambda gate_up, act="silu", lane_order=False: reference(gate_up.contiguous(), act, lane_order))
