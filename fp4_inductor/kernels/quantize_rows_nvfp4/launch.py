"""Host side of ``fp4.quantize_rows_nvfp4`` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import nvfp4
from ...ops import quantize_rows_nvfp4 as contract
from .. import host
from .triton_blocks import quantize_blocks

WARPS = 4


def block(blocks: int) -> int:
    """Blocks of 16 a program takes, of a row of ``blocks``: a power of two; 256 are 32 values a thread."""
    return min(256, 1 << max(blocks - 1, 0).bit_length())


def quantize_rows_nvfp4(x: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[M, K/2]`` and E4M3 ``[M, K/16]``."""
    contract.check(x, row_scale)
    m, k = x.shape
    qdata = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(m, k // nvfp4.GROUP, dtype=torch.uint8, device=x.device)
    if scale.numel():
        blocks, size = scale.shape[1], block(scale.shape[1])
        with torch.cuda.device(x.device):
            quantize_blocks[(m, -(-blocks // size))](
                host.aligned(x), row_scale.contiguous(), qdata, scale, blocks, BLOCK=size, CVT=host.arch(x.device) >= 100, num_warps=WARPS
            )
    return qdata, scale.view(nvfp4.SCALE_DTYPE)
