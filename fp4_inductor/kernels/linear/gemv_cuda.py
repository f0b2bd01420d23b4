"""cuda_gemv: one row of fp4.linear, bound by memory (``csrc/gemm/linear_gemv.cu``); alone, or with an epilogue; with an RMSNorm ahead of it."""

from __future__ import annotations

from ..forms import Library
from ..kernel import EMULATED, MEASURED_H100, Kernel, On
from .finishes import finishes

# A warp takes steps of ``rows`` rows of the weight by 1024 k; ``k_groups`` of the ``warps`` of a block share K; ``stages`` steps are in flight.
_TILE = ("rows", "warps", "k_groups", "stages")
_WHY = "as triton_gemv, but its first weights, up to 80 KB a multiprocessor, are on their way before the kernel before it has ended"
_WHY_90 = (
    "a step of 12 layers of an 8B model, batch 1, takes 1.231 ms on an H100 with it and with two norms a layer folded in, 1.256 with triton_gemv, which serves "
    "eager calls: nothing begins early there"
)


def _kernel(op: str, finish: str, why: str) -> Kernel:
    library = Library("gemm/linear_gemv.cu", ("qdata", "scale"), _TILE, finish, early=True, most_rows=lambda arch: 1, norm=True)
    name = f"cuda_gemv{'' if finish == 'plain' else f'_{finish}'}"
    on = (On(90, 90, MEASURED_H100, _WHY_90), On(80, 89, EMULATED, why), On(100, 129, EMULATED, why))
    return Kernel(op, name, "gemv", on, k_multiple=64, most_k=32768, form=library)


KERNELS = (_kernel("linear", "plain", _WHY), *(_kernel(op, finish, saves) for op, finish, saves in finishes()))
