"""fp4.linear and fp4.sparse_linear on a CPU.

Up to 8 activation rows are multiplied by the packed weight directly. For more rows a block of the weight that fits the cache is decoded and multiplied, then
the next block.

The C kernels (:mod:`.cpu_native`) decode 16 weights in three instructions. If there is no C compiler, ATen looks up each byte in a table, which is five to ten
times slower. ``explain()`` says which one runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import e2m1, nvfp4, sparse24
from ...ops import dequantize as dequantize_contract
from ...ops import linear as contract
from ...ops import linear_w4a4 as w4a4_contract
from ...ops import quantize_rows_nvfp4
from ...ops import sparse_dequantize as sparse_dequantize_contract
from ...ops import sparse_linear as sparse_contract
from ...ops.members import members
from .. import host, registry, select
from . import cpu_native

_BLOCK_WEIGHTS = 1 << 20  # 2 MB of bfloat16: stays in the L2 / L3 between decode and GEMM
_KEPT_BYTES = 1 << 22
_KEPT_VIEWS = 64
_CHUNK = 1 << 22  # activations dequantised at once: 16 MB of float32


def linear(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    """``x [..., K] @ W.T + bias``, accumulated in float32; one rounding to ``x.dtype`` for M <= 8."""
    contract.check(x, qdata, scale, global_scale, bias, prefill, rows)
    n, k = qdata.shape[0], x.shape[-1]
    m = x.shape[:-1].numel()
    # On a CPU the kernel depends on M only with this option and with kernels from outside, so only they ask which one it is.
    if registry.foreign("linear") and (y := _from_outside("linear", x, (qdata, scale, global_scale), bias, prefill, rows)) is not None:
        return y
    if prefill == "nvfp4" and m and n and k and host.row_for("linear", x, m, n, k, prefill).kernel != "cpu":
        return w4a4_contract.rounded(x.reshape(m, k), qdata, scale, global_scale, bias, rows).view(*x.shape[:-1], n)
    return _product(x, (qdata,), scale, global_scale, bias, rows)


def _from_outside(op: str, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, prefill: str, rows: Sequence[int] | None) -> Tensor | None:
    """By the kernel from outside that serves this M; None: none does."""
    n, k, m, g = weight[0].shape[0], x.shape[-1], x.shape[:-1].numel(), weight[-1]
    if not (m and n and k):
        return None
    launch = host.row_for(op, x, m, n, k, prefill, counts=select.Counts(scales=len(rows or (0,)))).implementation.launch
    if launch is None:
        return None
    y = launch(x.reshape(-1, x.shape[-1]).contiguous(), *(t.contiguous() for t in weight[:-1]), g.reshape(()) if rows else g, bias)
    return y.view(*x.shape[:-1], n)


def linear_w4a4(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[M, N]`` in ``dtype``: the activations dequantised to float32, some rows at a time, times the weight as in :func:`linear`; one rounding."""
    w4a4_contract.check(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype)
    (m, k), n = (x_qdata.shape[0], x_qdata.shape[1] * 2), qdata.shape[0]
    if m == 0 or n == 0 or k == 0:
        return contract.without_products(row_scale.new_empty((m, k), dtype=dtype), n, bias)
    out = torch.empty(m, n, dtype=dtype)
    step = max(1, _CHUNK // k)
    for start in range(0, m, step):
        rows = slice(start, start + step)
        x = quantize_rows_nvfp4.dequantize(x_qdata[rows], x_scale[rows], row_scale[rows])
        out[rows] = _product(x, (qdata,), scale, global_scale, None if bias is None else bias.float())
    return out


def sparse_linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """As :func:`linear`, W 2:4-sparse. Illegal metadata is a SparsityError here: the C kernels read it anyway."""
    sparse_contract.check(x, values, meta, scale, global_scale, bias, prefill, rows)
    weight = values, meta, scale, global_scale
    if registry.foreign("sparse_linear") and (y := _from_outside("sparse_linear", x, weight, bias, prefill, rows)) is not None:
        return y
    return _product(x, (values, meta), scale, global_scale, bias, rows)


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to :func:`fp4_inductor.formats.nvfp4.dequantize`."""
    dequantize_contract.check(qdata, scale, global_scale, dtype)
    if not cpu_native.status()[0] or qdata.numel() == 0:
        return dequantize_contract.reference(qdata, scale, global_scale, dtype)
    return _dequantized((qdata,), scale, global_scale, dtype)


def sparse_dequantize(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., N, K]`` in ``dtype``, bit-equal to :func:`fp4_inductor.formats.sparse24.dequantize_sparse24`."""
    sparse_dequantize_contract.check(values, meta, scale, global_scale, dtype)
    if not cpu_native.status()[0] or values.numel() == 0:
        sparse24.validate_meta(meta)
        return sparse_dequantize_contract.reference(values.contiguous(), meta.contiguous(), scale, global_scale, dtype)
    return _dequantized((values, meta), scale, global_scale, dtype)


def _product(x: Tensor, packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int] | None = None) -> Tensor:
    """``packed``: ``(qdata,)`` or ``(values, meta)``."""
    n, k = packed[0].shape[0], x.shape[-1]
    m = x.shape[:-1].numel()
    if m == 0 or n == 0 or k == 0:
        return contract.without_products(x, n, bias)
    x_rows, packed, scale = x.reshape(m, k).contiguous(), tuple(t.contiguous() for t in packed), scale.contiguous()
    if rows:
        y = torch.cat([product(x_rows, tuple(own), s, float(g)) for *own, s, g in members((*packed, scale), global_scale, rows)], -1)
    else:
        y = product(x_rows, packed, scale, float(global_scale))
    if bias is not None:
        y += bias
    return y.to(x.dtype).view(*x.shape[:-1], n)


def product(rows: Tensor, packed: tuple[Tensor, ...], scale: Tensor, g: float) -> Tensor:
    """``rows [M, K] @ W.T``, float32 for up to 8 rows, else in the dtype of ``rows``. Nothing is checked; all contiguous, for a strided GEMM may
    sum in another order; M, N, K > 0."""
    native, _ = cpu_native.status()
    if native and rows.shape[0] <= cpu_native.MAX_M:
        return cpu_native.gemv(rows.float(), packed[0], scale, g, *packed[1:])
    return _blocked(rows, packed, scale, g, native)


def _dequantized(packed: tuple[Tensor, ...], scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(*scale.shape[:-1], scale.shape[-1] * nvfp4.GROUP, dtype=torch.float32 if dtype == torch.float16 else dtype)
    stacks = (t.contiguous().view(-1, *t.shape[-2:]) for t in (out, scale, *packed))
    for g, w, s, codes, *meta in zip(global_scale.reshape(-1), *stacks, strict=True):
        cpu_native.dequantize_rows(codes, s, float(g), w, *meta)
    return out.to(dtype)


def _blocked(rows: Tensor, packed: tuple[Tensor, ...], scale: Tensor, g: float, native: bool) -> Tensor:
    n, k = packed[0].shape[0], rows.shape[1]
    step = max(1, min(n, _BLOCK_WEIGHTS // k))
    decode: _NativeDecoder | _AtenDecoder = (_NativeDecoder if native else _AtenDecoder)(step, k, rows.dtype)
    if step == n:
        return torch.mm(rows, decode(scale, g, *packed).t())
    out = rows.new_empty((rows.shape[0], n))
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        torch.mm(rows, decode(scale[block], g, *(t[block] for t in packed)).t(), out=out[:, block])
    return out


class _Scratch(threading.local):
    """Memory for one decoded block, for each thread. It is kept, because the page faults of a fresh buffer take longer than decoding into it."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def view(self, n: int, k: int, dtype: torch.dtype) -> Tensor:
        found = self.views.get((n, k, dtype))
        if found is not None:
            return found
        size = n * k * dtype.itemsize
        if self.memory is None or self.memory.numel() < size or len(self.views) > _KEPT_VIEWS:
            with torch.inference_mode(False):  # it outlives the mode of this call
                memory = torch.empty(max(size, _KEPT_BYTES), dtype=torch.uint8)
            if size > _KEPT_BYTES:
                return memory.view(dtype).view(n, k)
            self.memory, self.views = memory, {}
        return self.views.setdefault((n, k, dtype), self.memory[:size].view(dtype).view(n, k))


_scratch = _Scratch()


class _NativeDecoder:
    def __init__(self, step: int, k: int, dtype: torch.dtype):
        self.dtype, self.step = dtype, step
        self.buffer = _scratch.view(step, k, torch.float32 if dtype == torch.float16 else dtype)

    def __call__(self, scale: Tensor, g: float, codes: Tensor, *meta: Tensor) -> Tensor:
        out = self.buffer if codes.shape[0] == self.step else self.buffer[: codes.shape[0]]
        cpu_native.dequantize_rows(codes, scale, g, out, *meta)
        return out.to(self.dtype) if self.dtype == torch.float16 else out


class _AtenDecoder:
    """A table lookup for each byte gives two float32. In bfloat16 ATen's multiplication by a broadcast scale would be 20 times slower."""

    def __init__(self, step: int, k: int, dtype: torch.dtype):
        self.dtype = dtype
        self.pairs = e2m1.byte_pairs(torch.device("cpu"))
        self.index = torch.empty(step * k // 2, dtype=torch.int32)
        self.values = torch.empty(step * k // 2, dtype=torch.float64)

    def __call__(self, scale: Tensor, g: float, codes: Tensor, *meta: Tensor) -> Tensor:
        for m in meta:
            sparse24.validate_meta(m)
        qdata = sparse24.decompress(codes, *meta) if meta else codes
        used = qdata.numel()
        self.index[:used].view(qdata.shape).copy_(qdata)
        torch.index_select(self.pairs, 0, self.index[:used], out=self.values[:used])
        w = self.values[:used].view(torch.float32).view(*scale.shape, nvfp4.GROUP)
        w.mul_(scale.float().unsqueeze(-1)).mul_(g)
        return w.view(qdata.shape[0], -1).to(self.dtype)
