"""The dispatch rows: which kernel serves which call, on which architecture, up to which M, and why.

Data, not code. ``select.plan`` turns rows and a call into an ordered list of regimes; the lowerings and the
self-dispatching op both read that list, so a compiled graph and an eager call never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

REGIMES = ("gemv", "small", "mid", "large_fp8", "large_dense", "cpu", "glu", "unfused")
BF16 = (torch.bfloat16,)
HALF = (torch.bfloat16, torch.float16)
ANY = (torch.bfloat16, torch.float16, torch.float32)

Status = Literal["measured on H200", "compiled, not run", "runs in CI"]


@dataclass(frozen=True)
class Row:
    """One way to serve one op in one regime.

    Args:
        op: the ``torch.ops.fp4`` name.
        regime: one of :data:`REGIMES`; also the key of a threshold override in ``DispatchConfig``.
        kernel: launcher / template name.
        arch: inclusive range of compute capability times ten (0 for CPU).
        max_m: largest number of activation rows this row serves; None: no limit; 0: off until a threshold for its regime
            switches it on (a kernel that nobody has timed, where a measured one serves).
        dtypes: activation dtypes.
        reason: the measurement or the hardware fact behind the row.
        status: what has been run.
        large_m: the values of ``large_m`` under which the row applies.
        k_multiple, n_multiple: divisibility the kernel needs.
        csrc: needs the compiled CUDA sources.
        siblings: serves several layers of one call, each with a global scale of its own; else they are called one by one.
        without: a regime; this row serves only calls that no row of that regime takes.
    """

    op: str
    regime: str
    kernel: str
    arch: tuple[int, int]
    max_m: int | None
    dtypes: tuple[torch.dtype, ...]
    reason: str
    status: Status
    large_m: tuple[str, ...] = ("auto", "fp8", "bf16")
    k_multiple: int = 16
    n_multiple: int = 1
    csrc: bool = False
    siblings: bool = False
    without: str | None = None


_GEMV = "bandwidth-bound SIMT dot on packed words, 1.1-1.3x the read floor at M = 1; epilogues fuse behind it"
_SMALL = "packed weights straight into mma.sync: 17.4 us at 8192x8192, M = 8, where bf16 cuBLAS takes 34"
_MID = "decode in registers, tensor cores; first version: above M = 64 one transient FP8 pass costs less"
_GLU = "the GEMV's loop over rows n of gate and up, and their product: one launch, no intermediate; off until timed"
_FP8 = "FP8 tensor cores; the transient weight costs one pass; rowwise scaled_mm writes bfloat16"

ROWS: tuple[Row, ...] = (
    Row("linear", "cpu", "cpu", (0, 0), None, ANY, "C kernel: GEMV for M <= 8, else decode a cached block and multiply; dispatches itself", "runs in CI"),
    Row("linear", "gemv", "triton_gemv", (90, 90), 1, HALF, _GEMV, "measured on H200", siblings=True),
    Row("linear", "gemv", "triton_gemv", (80, 89), 1, HALF, _GEMV, "compiled, not run", siblings=True),
    Row("linear", "gemv", "triton_gemv", (100, 129), 1, HALF, _GEMV, "compiled, not run", siblings=True),
    Row(
        "linear",
        "gemv",
        "triton_gemv",
        (90, 90),
        4,
        HALF,
        "without the small kernel: still ahead of padding to a tensor-core tile",
        "measured on H200",
        without="small",
        siblings=True,
    ),
    Row("linear", "gemv", "triton_gemv", (80, 89), 2, HALF, "without the small kernel", "compiled, not run", without="small", siblings=True),
    Row("linear", "gemv", "triton_gemv", (100, 129), 4, HALF, "without the small kernel", "compiled, not run", without="small", siblings=True),
    Row("linear", "small", "cuda_small", (90, 90), 32, HALF, _SMALL, "measured on H200", k_multiple=64, csrc=True),
    Row("linear", "small", "cuda_small", (80, 89), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc=True),
    Row("linear", "small", "cuda_small", (100, 129), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc=True),
    Row("linear", "mid", "triton_mid", (90, 90), 64, HALF, _MID, "measured on H200", siblings=True),
    Row("linear", "mid", "triton_mid", (80, 88), 256, HALF, "as on sm_90; no FP8 tensor cores to hand over to", "compiled, not run", siblings=True),
    Row("linear", "mid", "triton_mid", (89, 89), 64, HALF, _MID, "compiled, not run", siblings=True),
    Row("linear", "mid", "triton_mid", (100, 129), 64, HALF, _MID, "compiled, not run", siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (90, 90), None, BF16, _FP8, "measured on H200", ("auto", "fp8"), 16, 16, siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (89, 89), None, BF16, _FP8, "compiled, not run", ("auto", "fp8"), 16, 16, siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (100, 129), None, BF16, _FP8, "compiled, not run", ("auto", "fp8"), 16, 16, siblings=True),
    Row(
        "linear",
        "large_dense",
        "dequantize + mm",
        (80, 129),
        None,
        ANY,
        "transient weight in the activation's dtype, the library GEMM",
        "measured on H200",
        siblings=True,
    ),
    Row("linear_glu", "glu", "triton_gemv_glu", (80, 129), 0, HALF, _GLU, "compiled, not run"),
    Row("linear_glu", "unfused", "linear, then act * up", (0, 129), None, ANY, "fp4.linear by its own rows; the product is a pointwise kernel", "runs in CI"),
    Row("linear_fp8", "cpu", "cpu", (0, 0), None, ANY, "float32 products of cached blocks: saves memory, not time", "runs in CI", k_multiple=1),
    Row("linear_fp8", "gemv", "triton_gemv_fp8", (80, 129), 1, HALF, "bandwidth-bound: half the bytes of bf16", "compiled, not run"),
    Row(
        "linear_fp8",
        "large_fp8",
        "scaled_mm",
        (89, 129),
        None,
        BF16,
        "FP8 tensor cores, activations rounded per row",
        "compiled, not run",
        ("auto", "fp8"),
        16,
        16,
    ),
    Row("linear_fp8", "large_dense", "cast + mm", (80, 129), None, ANY, "transient weight in the activation's dtype", "compiled, not run", k_multiple=1),
)
