"""cuda_table: up to 32 rows, weights decoded by a table in shared memory (``csrc/gemm/linear_table.cu``); alone, or with an epilogue."""

from __future__ import annotations

from ..forms import Library
from ..kernel import MEASURED_H100, Kernel, On
from .finishes import finishes, measured

# A tile is 16 * sets rows of the weight a block and 16 * sets_a_warp a warp; k_groups warps share K, ``substeps`` of them a stage.
_TILE = ("sets", "sets_a_warp", "k_groups", "substeps")
_WARPS = (16, "for more than 16 rows seven warps share K in place of eight where 6337 <= N <= 8448 and K >= 2048, for more than 24 rows about twelve do")
_WHY = "decodes by a table in shared memory: 14.4 us at N = K = 8192, M = 8, and 15.3 at M = 16, where cuda_small takes 17.3 and 24.7"
_FUSED = "timed in a whole model only (cuda_table alone: 14.4 us at N = K = 8192, M = 8)"


def _kernel(op: str, finish: str, why: str) -> Kernel:
    library = Library("gemm/linear_table.cu", ("qdata", "scale"), _TILE, finish, early=True, most_rows=lambda arch: 32)
    return Kernel(op, f"cuda_table{'' if finish == 'plain' else f'_{finish}'}", "small", measured(why), k_multiple=256, batch=_WARPS, form=library)


_HALF = "a layer of an 8B model 51.4 us at M = 8, 56.2 with launches of its norms"
# Half of an RMSNorm, with which the launch between two products is saved: the op, FP4_FINISH, one of HALVES, and what it does.
_HALVES = (
    ("linear_residual_squares", "pointwise", "squares", "writes what the products behind the RMSNorm of its result need of it"),
    ("rms_scaled_linear", "plain", "rms", "the RMSNorm of its activations is a factor of its float32 sums"),
    ("rms_scaled_linear_glu", "glu", "rms", "the RMSNorm of its activations is a factor of its float32 sums of gate and up"),
)


def _half(op: str, finish: str, half: str, what: str) -> Kernel:
    library = Library("gemm/linear_table.cu", ("qdata", "scale"), _TILE, finish, early=True, half=half, most_rows=lambda arch: 32)
    name = f"cuda_table{'_glu' if finish == 'glu' else ''}_{half}"
    return Kernel(
        op, name, "rms", (On(90, 90, MEASURED_H100, f"{what}: {_HALF}"),), k_multiple=256, n_multiple=16 if half == "squares" else 1, batch=_WARPS,
        form=library,
    )  # fmt: skip


KERNELS = (
    _kernel("linear", "plain", _WHY),
    *(_kernel(op, finish, f"{saves}; {_FUSED}") for op, finish, saves in finishes()),
    *(_half(*half) for half in _HALVES),
)
