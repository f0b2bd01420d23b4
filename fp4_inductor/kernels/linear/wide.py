"""cuda_wide: some dozens to hundreds of rows, weights decoded in registers as wgmma's operand (``csrc/gemm/linear_wide.cu``); alone, or with an epilogue."""

from __future__ import annotations

from ..forms import Library
from ..kernel import SPLITS, Kernel
from .finishes import GLU_SUMS, POINTWISE_SUMS, finishes, measured

# A tile is ``rows`` of the weight by ``tokens`` a block. ``k_groups`` warpgroups for each 64 rows share K, and so do ``splits`` blocks of a cluster;
# splits = 0: blocks take equal shares of all tiles' steps; -1: two blocks share activations.
_TILE = ("rows", "tokens", "k_groups", "splits")
_WHY = "decodes each weight once for all rows, in registers, as wgmma's operand: at N = K = 8192 18 us for M = 32, 22 for 64, 31 for 128, bf16 cuBLAS 35 to 38"
_FUSED = {
    "pointwise": f"{POINTWISE_SUMS}: with a residual 24.5 us at N = K = 8192, M = 64, in two kernels 24.9",
    "glu": f"{GLU_SUMS}: 24.4 us at N = K = 8192, M = 64, where the matmul alone takes 22.6",
}


def _kernel(op: str, finish: str, why: str) -> Kernel:
    library = Library("gemm/linear_wide.cu", ("qdata", "scale"), _TILE, finish, early=True)
    return Kernel(op, f"cuda_wide{'' if finish == 'plain' else f'_{finish}'}", "wide", measured(why), k_multiple=64, batch=SPLITS, form=library)


KERNELS = (_kernel("linear", "plain", _WHY), *(_kernel(op, finish, _FUSED[finish]) for op, finish, _ in finishes()))
