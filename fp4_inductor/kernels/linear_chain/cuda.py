"""cuda_gemv_chain: two to four products of one row in one launch (``csrc/gemm/linear_chain.cu``); each reads the result before it as soon as that is there.

Its calls are described a product at a time: N and K of one, whose own kernel is cuda_gemv.
"""

from __future__ import annotations

from ..forms import Library
from ..kernel import ANY, IN_CI, MEASURED_H100, Kernel, On

LIBRARY = Library("gemm/linear_chain.cu", finish=None, most_rows=lambda arch: 1)
_MOST_N = 57344  # shared memory holds what a block's share of the columns needs on a GPU of 16 multiprocessors and more, a part of one (MIG) included
_WHY = (
    "a step of 12 layers of an 8B model, batch 1, takes 1.17 ms on an H100 with it, 1.22 where q/k/v stay alone (regions), 1.23 with a launch for each "
    "product: weights of the next one are on their way"
)
KERNELS = (
    Kernel(
        "linear_chain", "cuda_gemv_chain", "chain", (On(90, 90, MEASURED_H100, _WHY),), k_multiple=64, n_multiple=2, most_k=16384, most_n=_MOST_N, form=LIBRARY
    ),
    Kernel("linear_chain", "one by one", "unfused", (On(0, 129, IN_CI, "each product by the kernel that its own op has"),), ANY),
)
