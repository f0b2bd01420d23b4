"""The CUDA kernels for few rows: ``csrc/gemm/linear_small.cu``, 1 to 32, and ``linear_table.cu``, 1 to 16 on sm_90."""

from __future__ import annotations

from dataclasses import astuple

from torch import Tensor

from .. import csrc
from . import configs

MAX_M = 32


def linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    arch: int,
    tile: configs.SmallConfig | configs.TableConfig | None = None,
    kernel: str = "linear_small",
) -> Tensor:
    """``[M, N]`` from ``x [M, K]``, 1 <= M <= 32 (16 on other than sm_90, and of ``"linear_table"``, which takes K % 256 == 0), on the current stream."""
    return csrc.call(kernel, x, (qdata, scale), global_scale, bias, arch, astuple(tile) if tile else ())
