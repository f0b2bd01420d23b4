"""fp4.linear on a CPU: decode a block of rows that fits the cache, multiply, go on; few rows multiply packed weights.

The C kernels (:mod:`.cpu_native`) decode 16 weights in three instructions. Where there is no C compiler, ATen does the
same with one table gather per byte: right, and five to ten times slower; ``explain()`` says which one runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import e2m1, nvfp4
from ...ops import dequantize as dequantize_contract
from ...ops import linear as contract
from . import cpu_native

_BLOCK_WEIGHTS = 1 << 20  # 2 MB of bfloat16: stays in the L2 / L3 between decode and GEMM


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, large_m: str = "auto") -> Tensor:
    """``x [..., K] @ W.T + bias``, accumulated in float32; one rounding to ``x.dtype`` for M <= 8."""
    contract.check(x, qdata, scale, global_scale, bias, large_m)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    m = x.shape[:-1].numel()
    if m == 0 or n == 0 or k == 0:
        return contract.without_products(x, n, bias)
    rows = x.reshape(m, k).contiguous()  # a strided GEMM may sum in another order
    qdata, scale = qdata.contiguous(), scale.contiguous()
    native, _ = cpu_native.status()
    if native and m <= cpu_native.MAX_M:
        y = cpu_native.gemv(rows.float(), qdata, scale, float(global_scale))
    else:
        y = _blocked(rows, qdata, scale, float(global_scale), native)
    if bias is not None:
        y += bias
    return y.to(x.dtype).view(*x.shape[:-1], n)


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to :func:`fp4_inductor.formats.nvfp4.dequantize`."""
    dequantize_contract.check(qdata, scale, global_scale, dtype)
    if not cpu_native.status()[0] or qdata.numel() == 0:
        return dequantize_contract.reference(qdata, scale, global_scale, dtype)
    out = torch.empty(*qdata.shape[:-1], qdata.shape[-1] * 2, dtype=torch.float32 if dtype == torch.float16 else dtype)
    stacks = (t.contiguous().view(-1, *t.shape[-2:]) for t in (qdata, scale, out))
    for q, s, w, g in zip(*stacks, global_scale.reshape(-1), strict=True):
        cpu_native.dequantize_rows(q, s, float(g), w)
    return out.to(dtype)


def _blocked(rows: Tensor, qdata: Tensor, scale: Tensor, g: float, native: bool) -> Tensor:
    n, k = qdata.shape[0], qdata.shape[1] * 2
    gemm_dtype = rows.dtype
    out = rows.new_empty((rows.shape[0], n))
    step = max(1, min(n, _BLOCK_WEIGHTS // k))
    decode = _NativeDecoder(step, k, gemm_dtype) if native else _AtenDecoder(step, k, gemm_dtype)
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        torch.mm(rows, decode(qdata[block], scale[block], g).t(), out=out[:, block])
    return out


class _NativeDecoder:
    def __init__(self, step: int, k: int, dtype: torch.dtype):
        self.dtype = dtype
        self.buffer = torch.empty(step, k, dtype=torch.float32 if dtype == torch.float16 else dtype)

    def __call__(self, qdata: Tensor, scale: Tensor, g: float) -> Tensor:
        out = self.buffer[: qdata.shape[0]]
        cpu_native.dequantize_rows(qdata, scale, g, out)
        return out.to(self.dtype)


class _AtenDecoder:
    """One gather per byte gives two float32; a bfloat16 multiply with a broadcast scale is 20x slower in ATen."""

    def __init__(self, step: int, k: int, dtype: torch.dtype):
        self.dtype = dtype
        self.pairs = e2m1.byte_pairs(torch.device("cpu"))
        self.index = torch.empty(step * k // 2, dtype=torch.int32)
        self.values = torch.empty(step * k // 2, dtype=torch.float64)

    def __call__(self, qdata: Tensor, scale: Tensor, g: float) -> Tensor:
        used = qdata.numel()
        self.index[:used].view(qdata.shape).copy_(qdata)
        torch.index_select(self.pairs, 0, self.index[:used], out=self.values[:used])
        w = self.values[:used].view(torch.float32).view(*scale.shape, nvfp4.GROUP)
        w.mul_(scale.float().unsqueeze(-1)).mul_(g)
        return w.view(qdata.shape[0], -1).to(self.dtype)
