"""Host side of the dequantisation kernels on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import dequantize as contract
from ...ops import dequantize_fp8 as contract_fp8
from ...ops import sparse_decompress as contract_decompress
from ...ops import sparse_dequantize as contract_sparse
from ...ops import sparse_dequantize_fp8 as contract_sparse_fp8
from .. import host
from .triton_rows import decompress_rows, dequantize_rows

_BLOCK = 128  # units at a time, one a thread
_STEPS = 4
_DECOMPRESS = 1024


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to the reference."""
    contract.check(qdata, scale, global_scale, dtype)
    return transient((qdata,), scale, global_scale, dtype)


def sparse_dequantize(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to the reference for legal metadata."""
    contract_sparse.check(values, meta, scale, global_scale, dtype)
    return transient((values, meta), scale, global_scale, dtype)


def dequantize_fp8(qdata: Tensor, scale: Tensor) -> Tensor:
    """E4M3 ``[N, K]``, the global scale left out; bit-equal to the reference."""
    contract_fp8.check(qdata, scale)
    return transient((qdata,), scale, None, torch.float8_e4m3fn)


def sparse_dequantize_fp8(values: Tensor, meta: Tensor, scale: Tensor) -> Tensor:
    """E4M3 ``[N, K]``, the global scale left out; bit-equal to the reference for legal metadata."""
    contract_sparse_fp8.check(values, meta, scale)
    return transient((values, meta), scale, None, torch.float8_e4m3fn)


def sparse_decompress(values: Tensor, meta: Tensor) -> Tensor:
    """Dense codes ``[..., N, K/2]``, bit-equal to the reference for legal metadata."""
    contract_decompress.check(values, meta)
    out = torch.empty(*values.shape[:-1], values.shape[-1] * 2, dtype=torch.uint8, device=values.device)
    groups = values.numel()
    if groups:
        with torch.cuda.device(values.device):
            decompress_rows[(-(-groups // _DECOMPRESS),)](values.contiguous(), meta.contiguous(), out.view(torch.int16), groups, BLOCK=_DECOMPRESS, num_warps=4)
    return out


def transient(packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype, ends: Tensor | None = None, parts: int = 1) -> Tensor:
    """Dense ``[..., N, K]`` of ``packed``: ``(qdata,)`` or ``(values, meta)``; without a global scale in units of ``WEIGHT_FACTOR``.

    ``ends``: of stacked matrices, int32, past the last row that each will be multiplied with; a matrix without rows may stay unwritten. So may
    one whose ``parts`` are matrices here.
    """
    lead, k = scale.shape[:-1], scale.shape[-1] * 16
    out = torch.empty(*lead, k, dtype=dtype, device=scale.device)
    if out.numel() == 0:
        return out
    (codes, *meta), scale = (host.aligned(t) for t in packed), host.aligned(scale)
    batched = scale.dim() > 2
    unit = 16 // dtype.itemsize
    units, a_matrix = out.numel() // unit, lead[-1] * k // unit if batched else 1
    with torch.cuda.device(scale.device):
        dequantize_rows[(-(-units // (_BLOCK * _STEPS)),)](
            codes, scale.view(torch.uint8), None if global_scale is None else global_scale.contiguous(), out, units, a_matrix,
            BATCHED=batched, **constants(unit, a_matrix), META=meta[0] if meta else None, ENDS=ends, PARTS=parts, num_warps=_BLOCK // 32,
        )  # fmt: skip
    return out


def constants(unit: int, units_a_matrix: int) -> dict[str, object]:
    """Constexprs for ``unit`` codes a thread and step; 16 bytes of results: 16 to E4M3, 8 to 16-bit floats, 4 to float32."""
    return dict(SMALL=units_a_matrix < _BLOCK * _STEPS, UNIT=unit, FACTOR=contract_fp8.WEIGHT_FACTOR, BLOCK=_BLOCK, STEPS=_STEPS)
