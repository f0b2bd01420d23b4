"""Host side of fp4.sparse_linear on CUDA: the self-dispatching op. No synchronisation, no host read, current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from ...formats import sparse24
from ...ops import sparse_linear as contract
from ...ops.dequantize_fp8 import scaled_product
from ...ops.sparse_dequantize import sparse_dequantize_rows
from .. import csrc, host
from ..kernel import for_scales
from ..linear.configs import Epilogue
from ..linear.launch import Bounds, by_rows, of_rows
from . import configs
from .triton_gemv import sparse_gemv
from .triton_mid import sparse_mid

fp4 = torch.ops.fp4
small, table, wide = map(host.by_cuda, ("sparse_linear_small", "sparse_linear_table", "sparse_linear_wide"))


def sparse_linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``x [..., K] @ W.T + bias`` by the row that ``select.plan`` gives for this M."""
    contract.check(x, values, meta, scale, global_scale, bias, prefill, rows)
    return by_rows("sparse_linear", x, sparse24.STORAGE, (values, meta, scale, global_scale), bias, prefill, LAUNCHERS, rows)


def gemv(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.GemvConfig | None = None,
    bounds: Bounds = (),
) -> Tensor:  # fmt: skip
    """One row a program; see :mod:`.triton_gemv`."""
    (m, k), n = x.shape, values.shape[0]
    c = tile or configs.gemv(n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.gemv_constants(c, n, k, host.arch(x.device), bounds)
    sparse_gemv[(-(-n // c.block_n), m)](
        x, values, meta, scale.view(torch.uint8), global_scale, y, m, n, k // 16, **constants, num_warps=c.num_warps, num_stages=2
    )
    return host.plus(y, bias)


def mid(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.MidConfig | None = None,
    bounds: Bounds = (),
) -> Tensor:  # fmt: skip
    """A few dozen rows; see :mod:`.triton_mid`."""
    (m, k), n = x.shape, values.shape[0]
    c = tile or configs.mid(m, n, k)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    constants = configs.mid_constants(c, n, k, x.dtype, bounds)
    sparse_mid[(-(-n // c.block_n) * -(-m // c.block_m),)](
        x, values, meta, scale.view(torch.uint8), global_scale, y, m, n, k, **constants, num_warps=c.num_warps, num_stages=c.num_stages
    )
    return host.plus(y, bias)


def large_fp8(x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, bounds: Bounds = ()) -> Tensor:
    """Many rows on FP8 tensor cores: transient E4M3 weight, activations rounded per token."""
    x8, x_scale = fp4.quantize_rows_fp8(x)
    return scaled_product(x8, x_scale, fp4.sparse_dequantize_fp8(values, meta, scale), of_rows(global_scale, bounds, values.shape[0]), x.dtype, bias)


def wide_fp8(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, tile: configs.WideFP8Config | None = None,
    bounds: Bounds = (),
) -> Tensor:  # fmt: skip
    """As :func:`large_fp8` without a transient weight; see ``csrc/sparse/sparse_linear_wide_fp8.cu``. The bias is added in the kernel.

    It begins early, as the dense layer's product does (``kernels/linear/launch.py``).
    """
    rows, parts, then = fp4.quantize_rows_fp8(x), (values, meta, scale), Epilogue(starts=bounds)
    name = for_scales("sparse_linear_wide_fp8", 1 + len(bounds))
    return csrc.call(name, rows, parts, global_scale, bias, host.arch(x.device), astuple(tile) if tile else (), then, early=True)


def large_dense(x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, bounds: Bounds = ()) -> Tensor:
    """Many rows through a transient weight in ``x.dtype``."""
    g = of_rows(global_scale, bounds, values.shape[0])
    w = (sparse_dequantize_rows if bounds else fp4.sparse_dequantize)(values, meta, scale, g, x.dtype)
    return torch.nn.functional.linear(x, w, bias)


LAUNCHERS: dict[str, Callable[..., Tensor]] = {
    "triton_sparse_gemv": gemv,
    "cuda_sparse_small": small,
    "cuda_sparse_table": table,
    "cuda_sparse_wide": wide,
    "cuda_sparse_wide_fp8": wide_fp8,
    "triton_sparse_mid": mid,
    "sparse_dequantize_fp8 + scaled_mm": large_fp8,
    "sparse_dequantize + mm": large_dense,
}
