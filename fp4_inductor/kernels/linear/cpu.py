"""fp4.linear on a CPU: dequantise a block of rows that fits the L2 cache, multiply, go on.

Measured on 2 Zen 5 cores, K = N = 4096: one table gather per byte (two float32 at once) and one float32 multiply per
weight; a bfloat16 multiply with a broadcast scale is twenty times slower in ATen, so scales are applied in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import e2m1, nvfp4
from ...ops import linear as contract

_BLOCK_WEIGHTS = 1 << 19  # 2 MB of float32: inside the L2 of current server cores


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, large_m: str = "auto") -> Tensor:
    """``x [..., K] @ W.T + bias``; float32 arithmetic for float32 and for few rows, else the GEMM of ``x.dtype``."""
    contract.check(x, qdata, scale, global_scale, bias, large_m)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = x.new_empty((m, n))
    if out.numel() == 0 or k == 0:
        out = out.zero_() if bias is None else out.copy_(bias)
        return out.view(*x.shape[:-1], n)

    # float32 for a few rows: the multiplication is cheap there, and the conversion of the weight would not be.
    gemm_dtype = torch.float32 if m <= 4 else x.dtype
    rows = rows.to(gemm_dtype)
    g = global_scale.reshape(())
    step = max(1, min(n, _BLOCK_WEIGHTS // k))
    pairs = e2m1.byte_pairs(qdata.device)
    index = torch.empty(step * k // 2, dtype=torch.int32)
    values = torch.empty(step * k // 2, dtype=torch.float64)
    for start in range(0, n, step):
        count = min(step, n - start)
        block = slice(start, start + count)
        used = count * k // 2
        index[:used].view(count, k // 2).copy_(qdata[block])
        torch.index_select(pairs, 0, index[:used], out=values[:used])
        w = values[:used].view(torch.float32).view(count, k // nvfp4.GROUP, nvfp4.GROUP)
        w.mul_((scale[block].float() * g).unsqueeze(-1))
        out[:, block] = torch.mm(rows, w.view(count, k).to(gemm_dtype).t())
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], n)
