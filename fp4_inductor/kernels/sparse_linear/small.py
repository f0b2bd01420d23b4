"""cuda_sparse_small: up to 32 rows, kept codes straight into mma.sp (``csrc/sparse/sparse_linear_small.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import COMPILED, MEASURED, SPLITS, Kernel, On

# A tile is 16 * rows_16 rows of the weight a block; K is split over warps, then over ``splits`` blocks.
_TILE = ("rows_16", "warps", "stages", "splits")


def _most_rows(arch: int) -> int:
    """As kLargeSharedMemory of ``csrc/common/device.cuh`` says."""
    return 32 if arch in (80, 87, 90) or 100 <= arch < 120 else 16


LIBRARY = Library("sparse/sparse_linear_small.cu", ("values", "meta", "scale"), _TILE, None, most_rows=_most_rows, siblings=True, apart=True)
_WHY_90 = (
    "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: 16.1 us at N = K = 8192, M = 1 to 8, where the Triton kernel "
    "takes 57 to 60 and bf16 cuBLAS 35"
)
_WHY = "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: a third of the Triton kernel's time on an H200; neither has run here"
KERNELS = (
    Kernel(
        "sparse_linear", "cuda_sparse_small", "small", (On(90, 90, MEASURED, _WHY_90), On(80, 89, COMPILED, _WHY), On(100, 129, COMPILED, _WHY)),
        k_multiple=32, batch=SPLITS, form=LIBRARY,
    ),
)  # fmt: skip
