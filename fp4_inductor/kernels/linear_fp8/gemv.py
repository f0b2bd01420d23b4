"""triton_gemv_fp8: one row of fp4.linear_fp8, bound by memory. Source: :mod:`.triton_gemv_fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..forms import Problem, Size, Triton, rows_grid
from ..kernel import RIGHT, Kernel, On


@dataclass(frozen=True)
class Fp8GemvConfig:
    """``block_n`` rows of the weight by ``block_k`` a step: 16 bytes a thread and load, as in the NVFP4 GEMV; not measured."""

    block_n: int
    block_k: int
    num_warps: int


def tile(p: Problem) -> Fp8GemvConfig:
    return Fp8GemvConfig(8, 1024 if p.k >= 1024 else 512 if p.k >= 512 else 256, 4)


def others(p: Problem) -> list[Fp8GemvConfig]:
    return [Fp8GemvConfig(bn, bk, 4) for bn in (4, 8, 16) for bk in (512, 1024) if bk <= max(p.k, 512)]


def constants(c: Fp8GemvConfig, p: Problem) -> dict[str, Any]:
    even = p.n % c.block_n == 0 and p.k % c.block_k == 0
    return dict(BLOCK_M=1, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=even, CVT=p.arch >= 89, num_warps=c.num_warps, num_stages=2)


FORM = Triton(
    "linear_fp8.triton_gemv_fp8:linear_fp8_gemv", "fp4_linear_fp8_gemv", ("X", "WEIGHT", "WEIGHT_SCALE"),
    (Size("M", "X", 0), Size("N", "WEIGHT", 0), Size("K", "WEIGHT", 1)), rows_grid, tile, others, constants,
)  # fmt: skip
KERNELS = (Kernel("linear_fp8", "triton_gemv_fp8", "gemv", (On(80, 129, RIGHT, "bound by memory: half the bytes of bf16"),), k_multiple=1, form=FORM),)
