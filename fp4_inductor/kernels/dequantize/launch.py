"""Host side of the dequantisation kernels on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import dequantize as contract
from ...ops import dequantize_fp8 as contract_fp8
from .triton_rows import dequantize_rows

_BLOCK = 1024  # bytes a program: 2048 weights, 16 a thread


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to the reference."""
    contract.check(qdata, scale, global_scale, dtype)
    out = torch.empty(*qdata.shape[:-1], qdata.shape[-1] * 2, dtype=dtype, device=qdata.device)
    matrix = qdata.shape[-2] * qdata.shape[-1]
    _launch(qdata, scale, global_scale.contiguous(), out, groups_per_matrix=max(matrix // 8, 1), batched=qdata.dim() > 2, fp8=False)
    return out


def dequantize_fp8(qdata: Tensor, scale: Tensor) -> Tensor:
    """E4M3 ``[N, K]``, the global scale left out; bit-equal to the reference."""
    contract_fp8.check(qdata, scale)
    out = torch.empty(qdata.shape[0], qdata.shape[1] * 2, dtype=torch.float8_e4m3fn, device=qdata.device)
    _launch(qdata, scale, None, out, groups_per_matrix=1, batched=False, fp8=True)
    return out


def _launch(qdata: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor, groups_per_matrix: int, batched: bool, fp8: bool) -> None:
    total = qdata.numel()
    if total == 0:
        return
    qdata, scale = qdata.contiguous(), scale.contiguous()
    with torch.cuda.device(qdata.device):
        dequantize_rows[(-(-total // _BLOCK),)](
            qdata, scale.view(torch.uint8), global_scale, out, total, groups_per_matrix, contract_fp8.WEIGHT_FACTOR,
            BATCHED=batched, FP8=fp8, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
