"""Host side of fp4.linear on CUDA: the self-dispatching op. No synchronisation, no host read, current stream."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError
from ...formats import nvfp4
from ...formats.storage import Storage
from ...ops import linear as contract
from ...ops import linear_w4a4
from ...ops.dequantize import dequantize_rows
from ...ops.dequantize_fp8 import fp8_product
from ...ops.members import row_scales, spans
from .. import csrc, host, select
from ..select import Call
from . import configs
from .triton_gemv import linear_gemv
from .triton_mid import linear_mid

fp4 = torch.ops.fp4
small, table, wide = map(host.by_cuda, ("linear_small", "linear_table", "linear_wide"))


def call_of(x: Tensor, qdata: Tensor, prefill: str = "auto") -> Call:
    """The description of a call that ``select.plan`` reads."""
    return select.describe("linear", x.device, x.dtype, qdata.shape[0], qdata.shape[1] * 2, prefill)


def linear(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    """``x [..., K] @ W.T + bias`` by the row that ``select.plan`` gives for this M."""
    contract.check(x, qdata, scale, global_scale, bias, prefill, rows)
    return by_rows("linear", x, nvfp4.STORAGE, (qdata, scale, global_scale), bias, prefill, _LAUNCHERS, rows)


def by_rows(
    op: str, x: Tensor, storage: Storage, weight: tuple[Tensor, ...], bias: Tensor | None, prefill: str, launchers: dict[str, Callable[..., Tensor]],
    members: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Call the launcher of the row of ``op`` for this M with ``(rows of x, *weight, bias)``, tensors contiguous and 16-byte aligned.

    ``members``: the rows at which those with a global scale each begin; a launcher takes the second's and the third's as ``bounds``.
    """
    if x.device.type != "cuda":
        raise DeviceError(f"the CUDA kernel of fp4.{op} got tensors elsewhere", value=str(x.device), limit="cuda", remedy="Move them with .to('cuda').")
    n, k = storage.logical(weight[0].shape)
    lead = x.shape[:-1]
    m = math.prod(lead)
    if m == 0 or n == 0 or k == 0:
        return contract.without_products(x, n, bias)
    if members and len(members) > configs.MAX_SCALES:
        call = functools.partial(by_rows, op, x, storage)
        return torch.cat([call(part, b, prefill, launchers, own) for part, b, own in _groups(weight, bias, members, n)], -1)
    rows, bounds = x.reshape(m, k), tuple(members or ())[1:]
    more: dict[str, Any] = {"bounds": bounds} if bounds else {}
    if members:
        weight = (*weight[:-1], weight[-1].contiguous() if bounds else weight[-1].reshape(()))
    row = host.row_for(op, x, m, n, k, prefill, scales=1 + len(bounds))
    launch = row.implementation.launch or launchers[row.kernel]
    if row.csrc:  # its operator sees to device, strides and alignment
        return launch(rows, *weight, bias, **more).view(*lead, n)
    with torch.cuda.device(x.device):
        bias = None if bias is None else host.aligned(bias)
        y = launch(host.aligned(rows), *(host.aligned(t) for t in weight[:-1]), weight[-1], bias, **more)
    return y.view(*lead, n)


def _groups(weight: tuple[Tensor, ...], bias: Tensor | None, members: Sequence[int], n: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None, list[int]]]:
    """``(weight, bias, members)`` of as many members at a time as one kernel takes, views."""
    for i in range(0, len(members), configs.MAX_SCALES):
        own = members[i : i + configs.MAX_SCALES]
        start, count = own[0], spans(members, n)[i + len(own) - 1][1] - own[0]
        part = (*(t.narrow(0, start, count) for t in weight[:-1]), weight[-1].narrow(0, i, len(own)))
        yield part, None if bias is None else bias.narrow(0, start, count), [begin - start for begin in own]


Bounds = tuple[int, ...]  # the rows at which the second and the third global scale begin


def gemv(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.GemvConfig | None = None, bounds: Bounds = ()
) -> Tensor:
    """A few rows; see :mod:`.triton_gemv`."""
    (m, k), n = x.shape, qdata.shape[0]
    c = tile or configs.gemv(m, n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.gemv_constants(c, n, k, host.arch(x.device), bounds)
    linear_gemv[(-(-n // c.block_n), -(-m // c.block_m))](
        x, qdata, scale.view(torch.uint8), global_scale, y, m, n, k // 8, **constants, num_warps=c.num_warps, num_stages=2
    )
    return host.plus(y, bias)


def mid(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.MidConfig | None = None, bounds: Bounds = ()
) -> Tensor:
    """Up to a few hundred rows; see :mod:`.triton_mid`."""
    (m, k), n = x.shape, qdata.shape[0]
    c = tile or configs.mid(m, n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.mid_constants(c, n, k, x.dtype, bounds)
    linear_mid[(-(-n // c.block_n) * -(-m // c.block_m),)](
        x, qdata, scale.view(torch.uint8), global_scale, y, m, n, k, **constants, num_warps=c.num_warps, num_stages=c.num_stages
    )
    return host.plus(y, bias)


def large_fp8(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, bounds: Bounds = ()) -> Tensor:
    """Many rows on FP8 tensor cores: transient E4M3 weight, activations rounded per token."""
    x8, x_scale = fp4.quantize_rows_fp8(x)
    return fp8_product(x8, x_scale, qdata, scale, of_rows(global_scale, bounds, qdata.shape[0]), x.dtype, bias)


def of_rows(global_scale: Tensor, bounds: Bounds, n: int) -> Tensor:
    """``[n]``, or the one scale that all rows have."""
    return row_scales(global_scale, (0, *bounds), n) if bounds else global_scale


def wide_fp8(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.WideFP8Config | None = None,
    bounds: Bounds = (),
) -> Tensor:  # fmt: skip
    """As :func:`large_fp8` without a transient weight; see ``csrc/gemm/linear_wide_fp8.cu``. The bias is added in the kernel.

    The product may fetch weights while the kernel before it runs: that is the one that rounds, which writes none, and which
    lets the product begin only after all kernels before it have ended.
    """
    x8, x_scale = fp4.quantize_rows_fp8(x, True)
    then = configs.Epilogue(starts=bounds)
    return csrc.call("linear_wide_fp8", (x8, x_scale), (qdata, scale), global_scale, bias, host.arch(x.device), astuple(tile) if tile else (), then, early=True)


def large_dense(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, bounds: Bounds = ()) -> Tensor:
    """Many rows through a transient weight in ``x.dtype``."""
    g = of_rows(global_scale, bounds, qdata.shape[0])
    return torch.nn.functional.linear(x, (dequantize_rows if bounds else fp4.dequantize)(qdata, scale, g, x.dtype), bias)


def large_nvfp4(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, bounds: Bounds = ()) -> Tensor:
    """Both operands in NVFP4; see :mod:`fp4_inductor.ops.linear_w4a4`."""
    return linear_w4a4.rounded(x, qdata, scale, global_scale, bias, (0, *bounds) if bounds else None)


_LAUNCHERS: dict[str, Callable[..., Tensor]] = {
    "triton_gemv": gemv,
    "cuda_small": small,
    "cuda_small_any_k": small,
    "cuda_table": table,
    "cuda_wide": wide,
    "cuda_wide_fp8": wide_fp8,
    "triton_mid": mid,
    "dequantize_fp8 + scaled_mm": large_fp8,
    "dequantize + mm": large_dense,
    "quantize_rows_nvfp4 + linear_w4a4": large_nvfp4,
}
