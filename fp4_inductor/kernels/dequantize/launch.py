"""Host side of the dequantisation kernels on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import dequantize as contract
from ...ops import dequantize_fp8 as contract_fp8
from ...ops import sparse_decompress as contract_decompress
from ...ops import sparse_dequantize as contract_sparse
from ...ops import sparse_dequantize_fp8 as contract_sparse_fp8
from .triton_rows import decompress_rows, dequantize_rows

_BLOCK = 1024  # bytes of dense codes a program: 2048 weights, 16 a thread


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to the reference."""
    contract.check(qdata, scale, global_scale, dtype)
    return _dense((qdata,), scale, global_scale, dtype)


def sparse_dequantize(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to the reference for legal metadata."""
    contract_sparse.check(values, meta, scale, global_scale, dtype)
    return _dense((values, meta), scale, global_scale, dtype)


def dequantize_fp8(qdata: Tensor, scale: Tensor) -> Tensor:
    """E4M3 ``[N, K]``, the global scale left out; bit-equal to the reference."""
    contract_fp8.check(qdata, scale)
    return _dense((qdata,), scale, None, torch.float8_e4m3fn)


def sparse_dequantize_fp8(values: Tensor, meta: Tensor, scale: Tensor) -> Tensor:
    """E4M3 ``[N, K]``, the global scale left out; bit-equal to the reference for legal metadata."""
    contract_sparse_fp8.check(values, meta, scale)
    return _dense((values, meta), scale, None, torch.float8_e4m3fn)


def sparse_decompress(values: Tensor, meta: Tensor) -> Tensor:
    """Dense codes ``[..., N, K/2]``, bit-equal to the reference for legal metadata."""
    contract_decompress.check(values, meta)
    out = torch.empty(*values.shape[:-1], values.shape[-1] * 2, dtype=torch.uint8, device=values.device)
    groups = values.numel()
    if groups:
        with torch.cuda.device(values.device):
            decompress_rows[(-(-groups // _BLOCK),)](values.contiguous(), meta.contiguous(), out.view(torch.int16), groups, BLOCK=_BLOCK, num_warps=4)
    return out


def _dense(packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``packed``: ``(qdata,)`` or ``(values, meta)``; without a global scale in units of ``WEIGHT_FACTOR``."""
    lead, k = scale.shape[:-1], scale.shape[-1] * 16
    out = torch.empty(*lead, k, dtype=dtype, device=scale.device)
    total = out.numel() // 2
    if total == 0:
        return out
    (codes, *meta), scale = (t.contiguous() for t in packed), scale.contiguous()
    matrix = max(lead[-1] * k // 16, 1) if scale.dim() > 2 else 1
    with torch.cuda.device(scale.device):
        dequantize_rows[(-(-total // _BLOCK),)](
            codes, scale.view(torch.uint8), None if global_scale is None else global_scale.contiguous(), out, total, matrix, contract_fp8.WEIGHT_FACTOR,
            BATCHED=scale.dim() > 2, FP8=global_scale is None, BLOCK=_BLOCK, META=meta[0] if meta else None, num_warps=4,
        )  # fmt: skip
    return out
