"""Host side of ``fp4.quantize_rows_fp8`` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import quantize_rows_fp8 as contract
from .triton_rows import quantize_rows


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 ``[M, K]`` and float32 ``[M, 1]``."""
    contract.check(x)
    m, k = x.shape
    out = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    if not x.numel():
        return out, torch.ones(m, 1, dtype=torch.float32, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        quantize_rows[(m,)](x.contiguous(), out, scale, k, contract.E4M3_MAX, **tile(k), num_warps=8)
    return out, scale


def tile(k: int) -> dict[str, int | bool]:
    """Rows of up to 8192 stay in registers; measured on an H200: at 2048 x 8192 16.6 us for 20.5, but at 2048 x 14336 53 for 34.7."""
    whole = k <= 8192
    return {"BLOCK": max(256, 1 << (k - 1).bit_length()) if whole else 2048, "WHOLE": whole}
