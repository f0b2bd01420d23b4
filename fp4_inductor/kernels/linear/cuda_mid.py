"""The CUDA kernel of ``csrc/gemm/linear_mid.cu``, up to a few hundred rows. Emulated, not timed: no default row names it."""

from __future__ import annotations

from dataclasses import astuple

from torch import Tensor

from .. import csrc
from . import configs


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: configs.CudaMidConfig | None = None) -> Tensor:
    """``[M, N]`` from ``x [M, K]``, any number of rows, on the current stream."""
    return csrc.call("linear_mid", x, (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())
