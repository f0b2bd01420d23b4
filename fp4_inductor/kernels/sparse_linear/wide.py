"""cuda_sparse_wide: some dozens to hundreds of rows, kept codes decoded in registers for sparse wgmma (``csrc/sparse/sparse_linear_wide.cu``)."""

from __future__ import annotations

from ..forms import Library
from ..kernel import MEASURED, SPLITS, Kernel, On

# A tile is ``rows`` of the weight by ``tokens`` a block. ``k_groups`` warpgroups for each 64 rows share K, and so do ``splits`` blocks of a cluster;
# splits = 0: two blocks, of neighbouring rows, share the activations.
LIBRARY = Library(
    "sparse/sparse_linear_wide.cu", ("values", "meta", "scale"), ("rows", "tokens", "k_groups", "splits"), None, early=True, siblings=True, apart=True
)
_WHY = (
    "kept codes decoded in registers for sparse wgmma: half the decoding and products of cuda_wide; at N = K = 8192 19.2 us for M = "
    "64, dense 21.6, and 39.9 for M = 256, with a temporary weight 63"
)
KERNELS = (Kernel("sparse_linear", "cuda_sparse_wide", "wide", (On(90, 90, MEASURED, _WHY),), k_multiple=256, batch=SPLITS, form=LIBRARY),)
