"""cuda_gemv: one row of fp4.linear, bound by memory (``csrc/gemm/linear_gemv.cu``); alone, or with an epilogue; with an RMSNorm ahead of it."""

from __future__ import annotations

from ..forms import Library
from ..kernel import EMULATED, LOST, Kernel, On
from .finishes import finishes

# A warp takes steps of ``rows`` rows of the weight by 1024 k; ``k_groups`` of the ``warps`` of a block share K; ``stages`` steps are in flight.
_TILE = ("rows", "warps", "k_groups", "stages")
_WHY = "as triton_gemv, but its first weights, up to 80 KB a multiprocessor, are on their way before the kernel before it has ended"
# Off until a whole step is faster with it.
_WHY_90 = "not timed in a whole step; the four products and two norms of an 8B model's layer take 51.5 us on an H100, by cuda_table the products alone 50.0"


def _kernel(op: str, finish: str, why: str) -> Kernel:
    library = Library("gemm/linear_gemv.cu", ("qdata", "scale"), _TILE, finish, early=True, most_rows=lambda arch: 1, norm=True)
    name = f"cuda_gemv{'' if finish == 'plain' else f'_{finish}'}"
    return Kernel(
        op, name, "gemv", (On(90, 90, LOST, _WHY_90), On(80, 89, EMULATED, why), On(100, 129, EMULATED, why)), k_multiple=64, most_k=32768, form=library
    )


KERNELS = (_kernel("linear", "plain", _WHY), *(_kernel(op, finish, saves) for op, finish, saves in finishes()))
