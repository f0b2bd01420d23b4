"""The CUDA kernels for middle M: ``csrc/gemm/linear_wide.cu`` and ``linear_wide_fp8.cu`` (wgmma)."""

from __future__ import annotations

from dataclasses import astuple

from torch import Tensor

from .. import csrc
from . import configs


def wide(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: configs.CudaWideConfig | None = None) -> Tensor:
    """``[M, N]`` from ``x [M, K]``, any number of rows, on the current stream; on sm_90 only and for K % 64 == 0."""
    return csrc.call("linear_wide", x, (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())


def wide_fp8(
    x8: Tensor,
    x_scale: Tensor,
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    arch: int,
    tile: configs.WideFP8Config | None = None,
) -> Tensor:
    """bfloat16 ``[M, N]`` from ``x8 [M, K]`` (E4M3) and ``x_scale [M, 1]``, on sm_90 and for K % 256 == 0: ``csrc/gemm/linear_wide_fp8.cu``."""
    return csrc.call("linear_wide_fp8", (x8, x_scale), (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())
