"""Host side of ``fp4.topk`` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import topk as contract
from .triton_rows import topk_rows


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One program a token."""
    contract.check(x, k)
    t, e = x.shape
    values, indices = x.new_empty((t, k)), x.new_empty((t, k), dtype=torch.int64)
    if values.numel():
        with torch.cuda.device(x.device):
            topk_rows[(t,)](x.contiguous(), values, indices, e, K=k, **tile(e, k))
    return values, indices


def tile(e: int, k: int) -> dict[str, int]:
    """A warp for up to 256 scores."""
    return {"BLOCK": max(32, 1 << (e - 1).bit_length()), "WIDTH": 1 << (k - 1).bit_length(), "num_warps": 1 if e <= 256 else 4}
