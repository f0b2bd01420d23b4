"""The dispatch rows: which kernel serves which call, on which architecture, up to which M, and why.

Data, not code. ``select.plan`` turns rows and a call into an ordered list of regimes; the lowerings and the
self-dispatching op both read that list, so a compiled graph and an eager call never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

REGIMES = ("gemv", "mid", "large_fp8", "large_dense", "cpu")
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
        max_m: largest number of activation rows this row serves; None: no limit.
        dtypes: activation dtypes.
        reason: the measurement or the hardware fact behind the row.
        status: what has been run.
        large_m: the values of ``large_m`` under which the row applies.
        k_multiple, n_multiple: divisibility the kernel needs.
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


ROWS: tuple[Row, ...] = (
    Row("linear", "cpu", "cpu", (0, 0), None, ANY, "C kernel: GEMV for M <= 8, else decode a cached block and multiply; dispatches itself", "runs in CI"),
    Row(
        "linear", "gemv", "triton_gemv", (89, 90), 4, HALF,
        "bandwidth-bound SIMT dot on packed words: 1.1-1.25x the read floor at M = 1; at M = 4 still ahead of padding to a tensor-core tile",
        "measured on H200",
    ),
    Row("linear", "gemv", "triton_gemv", (80, 88), 2, HALF, "as on sm_90 with mask decode (no E4M3 conversion instruction); half the ALU rate per byte", "compiled, not run"),
    Row("linear", "gemv", "triton_gemv", (100, 129), 4, HALF, "as on sm_90", "compiled, not run"),
    Row("linear", "mid", "triton_mid", (90, 90), 256, HALF, "decode in registers into wgmma; above, one transient FP8 pass costs less than decoding per tile", "measured on H200"),
    Row("linear", "mid", "triton_mid", (80, 89), 256, HALF, "decode in registers into mma.sync", "compiled, not run"),
    Row("linear", "mid", "triton_mid", (100, 129), 256, HALF, "decode in registers into tcgen05 / mma.sync", "compiled, not run"),
    Row(
        "linear", "large_fp8", "dequantize_fp8 + scaled_mm", (89, 89), None, (torch.bfloat16,),
        "FP8 tensor cores; rowwise scaled_mm writes bfloat16", "compiled, not run", ("auto", "fp8"), 16, 16,
    ),
    Row(
        "linear", "large_fp8", "dequantize_fp8 + scaled_mm", (90, 90), None, (torch.bfloat16,),
        "FP8 tensor cores run at 1.7x bf16 here; the transient weight costs one pass; rowwise scaled_mm writes bfloat16", "measured on H200", ("auto", "fp8"), 16, 16,
    ),
    Row(
        "linear", "large_fp8", "dequantize_fp8 + scaled_mm", (100, 129), None, (torch.bfloat16,),
        "FP8 tensor cores; rowwise scaled_mm writes bfloat16", "compiled, not run", ("auto", "fp8"), 16, 16,
    ),
    Row("linear", "large_dense", "dequantize + mm", (80, 129), None, ANY, "transient weight in the activation's dtype, then the library GEMM", "measured on H200"),
)  # fmt: skip
