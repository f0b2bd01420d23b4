"""triton_w4a4: fp4.linear_w4a4 by Triton's block-scaled product. Source: :mod:`.triton_block_scaled`."""

from __future__ import annotations

from typing import Any

from ..forms import Problem, Size, Triton, scale_bounds, tiles_grid
from ..kernel import COMPILED, Kernel, On
from ..linear.mid import MidConfig

BLOCK_SCALED = "FP4 tensor cores take codes and E4M3 scales as they lie in memory"
# What compiles without spills, by architecture; not measured. tcgen05 (sm_100 to 119) takes 128 rows a block or more, its sums lie in tensor
# memory; mma.sync (sm_120 on) keeps them in registers.
_TCGEN05 = (MidConfig(128, 128, 256, 8, 3), MidConfig(128, 256, 256, 8, 3), MidConfig(128, 64, 256, 4, 4))
_MMA_SYNC = (MidConfig(128, 128, 128, 8, 3), MidConfig(128, 64, 128, 4, 3), MidConfig(64, 128, 128, 4, 3), MidConfig(64, 64, 256, 4, 3))


def tile(p: Problem) -> MidConfig:
    few = p.n * p.m <= 128 * 128 * 128  # fewer blocks of the first tile than such a GPU has multiprocessors: narrower ones
    return others(p)[2 if few else 0]


def others(p: Problem) -> list[MidConfig]:
    return list(_MMA_SYNC if p.arch >= 120 else _TCGEN05)


def constants(c: MidConfig, p: Problem) -> dict[str, Any]:
    shape = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=p.k % c.block_k == 0, GROUP_N=c.group_n, NATIVE=True)
    return dict(**shape, **scale_bounds(p.bounds), num_warps=c.num_warps, num_stages=c.num_stages)


FORM = Triton(
    "linear_w4a4.triton_block_scaled:linear_w4a4", "fp4_linear_w4a4", ("X", "X_SCALE", "ROW_SCALE", "QDATA", "SCALE", "GLOBAL_SCALE"),
    (Size("M", "X", 0), Size("N", "QDATA", 0), Size("K", "QDATA", 1, times=2)), tiles_grid, tile, others, constants, likely=2048,
)  # fmt: skip
KERNELS = (
    Kernel(
        "linear_w4a4", "triton_w4a4", "large_nvfp4", (On(100, 120, COMPILED, BLOCK_SCALED), On(121, 129, COMPILED, BLOCK_SCALED, (3, 8))),
        batch=(1, "not examined"), form=FORM,
    ),
)  # fmt: skip
