"""triton_sparse_mid: some dozens of rows of fp4.sparse_linear where no CUDA kernel serves them. Source: :mod:`.triton_mid`."""

from __future__ import annotations

from ..forms import Problem, Size, Triton, tiles_grid
from ..kernel import COMPILED, MEASURED, Kernel, On
from ..linear import mid as dense
from ..linear.mid import MidConfig


def tile(p: Problem) -> MidConfig:
    """For about ``p.m`` rows; any number of rows is right."""
    if p.m > 32 and p.n <= 4096:
        return MidConfig(64, 32, 128, 4, 3)  # the dense tile's BLOCK_K = 256 spills here
    return dense.tile(p._replace(m=min(p.m, 64)))


def others(p: Problem) -> list[MidConfig]:
    block_m = tile(p).block_m
    return [MidConfig(block_m, bn, bk, 4, s) for bn in (32, 64) for bk in (64, 128) for s in (2, 3, 4)]


FORM = Triton(
    "sparse_linear.triton_mid:sparse_mid", "fp4_sparse_linear_mid", ("X", "VALUES", "META", "SCALE", "GLOBAL_SCALE"),
    (Size("M", "X", 0), Size("N", "VALUES", 0), Size("K", "X", 1)), tiles_grid, tile, others, dense.constants, likely=dense.LIKELY,
)  # fmt: skip

_WHY = "the dense mid kernel on codes decompressed in registers: 1.3-1.5x its instructions, 22% fewer bytes"
_WHY_90 = f"{_WHY}: 101 us at N = K = 8192, M = 64, dense weights 70, bf16 cuBLAS 38"
KERNELS = (
    Kernel(
        "sparse_linear", "triton_sparse_mid", "mid", (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        batch=dense.BATCH, tile_by_bound=True, form=FORM,
    ),
)  # fmt: skip
