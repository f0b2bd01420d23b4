"""The CUDA kernel of ``csrc/gemm/linear_small.cu`` (2 to 32 rows) through ctypes, compiled at first use."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...errors import KernelError
from ..build import cuda_library, pointer
from . import configs

MAX_M = 32


@functools.cache
def _library(arch: int) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = ctypes.CDLL(str(cuda_library("gemm/linear_small.cu", arch)))
    except (KernelError, OSError) as error:
        return None, str(error)
    library.fp4_linear_small.restype = ctypes.c_int
    return library, ""


def why_not(arch: int) -> str:
    """Empty if the kernel is built for ``arch`` (building it takes some seconds, once); else the reason."""
    return "" if arch == 0 else _library(arch)[1]


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: configs.SmallConfig | None = None) -> Tensor:
    """``[M, N]`` from contiguous, 16-byte aligned ``x [M, K]``, 1 <= M <= 32, K % 64 == 0, on the current stream."""
    (m, k), n = x.shape, qdata.shape[0]
    c = tile or configs.small(m, n, k, arch)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    library, reason = _library(arch)
    if library is None:
        raise KernelError(
            "csrc/gemm/linear_small.cu is not available",
            value=reason,
            limit=f"built for sm_{arch}",
            remedy="Call torch.ops.fp4.linear, which takes another kernel then.",
        )
    status = library.fp4_linear_small(
        pointer(x), pointer(qdata), pointer(scale), pointer(global_scale), pointer(bias), pointer(y), m, n, k,
        int(x.dtype == torch.float16), c.rows_16, c.warps, c.stages, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip
    if status:
        raise KernelError(
            "fp4_linear_small failed",
            value=f"cudaError {status} for M={m}, N={n}, K={k}, {c}",
            limit="cudaSuccess",
            remedy='Switch it off with fp4_inductor.dispatch(thresholds={"small": 0}).',
        )
    return y
