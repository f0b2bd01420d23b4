"""The CUDA kernel of ``csrc/sparse/sparse_linear_wide.cu`` (wgmma's sparse form), for a few to a hundred rows on sm_90."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor

from .. import csrc


@dataclass(frozen=True)
class SparseWideConfig:
    """``rows`` of the weight and ``tokens`` a block, ``k_groups`` warpgroups for each 64 rows, which share K, and ``splits`` blocks of a cluster, which share
    K; 0: two blocks, of neighbouring rows, share the activations."""

    rows: int
    tokens: int
    k_groups: int
    splits: int = 1


def linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, arch: int, tile: SparseWideConfig | None = None
) -> Tensor:
    """``[M, N]`` on the current stream.

    Args:
        x: bfloat16 or float16 ``[M, K]``, K % 256 == 0.
        values: uint8 ``[N, K/4]``, two kept codes a byte. meta: uint8 ``[N, K/8]``, all nibbles legal. scale: E4M3 ``[N, K/16]``.
        arch: compute capability times ten.
        tile: None: the kernel's choice.
    """
    return csrc.call("sparse_linear_wide", x, (values, meta, scale), global_scale, bias, arch, astuple(tile) if tile else ())
