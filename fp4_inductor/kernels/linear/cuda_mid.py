"""The CUDA kernels for middle M: ``csrc/gemm/linear_mid.cu`` (mma.sync) and ``linear_wide.cu`` (wgmma). Emulated, not timed: no default row names them."""

from __future__ import annotations

from dataclasses import astuple

from torch import Tensor

from .. import csrc
from . import configs


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: configs.CudaMidConfig | None = None) -> Tensor:
    """``[M, N]`` from ``x [M, K]``, any number of rows, on the current stream."""
    return csrc.call("linear_mid", x, (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())


def wide(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: configs.CudaWideConfig | None = None) -> Tensor:
    """As :func:`linear`, on sm_90 only and for K % 64 == 0."""
    return csrc.call("linear_wide", x, (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())
