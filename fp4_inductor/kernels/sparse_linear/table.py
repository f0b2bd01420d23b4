"""cuda_sparse_table: up to 16 rows, kept codes decoded by a table in shared memory (``csrc/sparse/sparse_linear_table.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import MEASURED, Kernel, On

# A tile is 16 * sets rows of the weight a block and 16 * sets_a_warp a warp; k_groups warps share K, in steps of 128 * substeps: 2, a warp's,
# or 4, of two warps, so that k_groups is even.
_WHY = "cuda_table's decoding on kept codes, for mma.sp: 9.7 us at N = K = 8192, M = 1 with PDL, where cuda_table takes 12.1; 11.7 for 13.8 without"
_TILE = ("sets", "sets_a_warp", "k_groups", "substeps")


def _most_rows(arch: int) -> int:
    return 16


LIBRARY = Library("sparse/sparse_linear_table.cu", ("values", "meta", "scale"), _TILE, None, early=True, most_rows=_most_rows, siblings=True, apart=True)
KERNELS = (Kernel("sparse_linear", "cuda_sparse_table", "small", (On(90, 90, MEASURED, _WHY),), k_multiple=256, least_n=16, batch=(16, ""), form=LIBRARY),)
