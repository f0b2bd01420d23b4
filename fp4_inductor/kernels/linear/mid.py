"""triton_mid: up to some dozens of rows of fp4.linear where no CUDA kernel serves them. Source: :mod:`.triton_mid`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import forms
from ..forms import Problem, Size, Triton, scale_bounds, tiles_grid
from ..kernel import COMPILED, MEASURED, Kernel, On

LIKELY = 64  # rows of a compiled graph that knows nothing of them
BATCH = (1, "the tile follows M; a graph with dynamic M keeps one")


@dataclass(frozen=True)
class MidConfig:
    """``block_n`` rows of the weight by ``block_m`` activations, ``block_k`` a step; ``group_n`` such columns of tiles take turns at the same rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_n: int = 8


def tile(p: Problem) -> MidConfig:
    """For about ``p.m`` rows; any number of rows is right. Measured on an H200; all compile without spills for sm_80 to sm_121."""
    narrow = p.n <= 4096
    if p.m <= 16:
        return MidConfig(16, 32, 256, 4, 3) if p.n <= 8192 else MidConfig(16, 64, 128, 4, 3)
    if p.m <= 32:
        return MidConfig(32, 32 if narrow else 64, 128, 4, 3)
    if p.m <= 64:
        return MidConfig(64, 32, 256, 4, 3) if narrow else MidConfig(64, 64, 128, 4, 4)
    return MidConfig(128, 64, 64, 4, 3)  # only sm_80 to 88 come here; BLOCK_K = 128 spills there


def others(p: Problem) -> list[MidConfig]:
    block_m = tile(p).block_m
    return [MidConfig(block_m, bn, bk, 4, s) for bn in (64, 128) for bk in (64, 128) for s in (2, 3, 4)]


def constants(c: MidConfig, p: Problem) -> dict[str, Any]:
    even = p.n % c.block_n == 0 and p.k % c.block_k == 0
    shape = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=even, GROUP_N=c.group_n, BF16=p.dtype == torch.bfloat16, ASM=forms.ASM)
    return dict(**shape, **scale_bounds(p.bounds), num_warps=c.num_warps, num_stages=c.num_stages)


FORM = Triton(
    "linear.triton_mid:linear_mid", "fp4_linear_mid", ("X", "QDATA", "SCALE", "GLOBAL_SCALE"),
    (Size("M", "X", 0), Size("N", "QDATA", 0), Size("K", "X", 1)), tiles_grid, tile, others, constants, likely=LIKELY,
)  # fmt: skip

_WHY = "decodes in registers for tensor cores; above M = 64 one pass that writes a temporary FP8 weight costs less"
_WHY_80 = "as on sm_90, but there are no FP8 tensor cores to hand over to"
KERNELS = (
    Kernel(
        "linear", "triton_mid", "mid",
        (On(90, 90, MEASURED, _WHY), On(80, 88, COMPILED, _WHY_80), On(89, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        batch=BATCH, tile_by_bound=True, form=FORM,
    ),
)  # fmt: skip
