"""MXFP4 weights as NVFP4 ones: the same codes, each exponent twice as an E4M3 power of two. What every MX reader shares."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...formats import mxfp4


def decode(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """``(qdata, scale, global_scale)`` without loss, or the dense float32 weight where the exponents of one matrix span too much.

    Args:
        qdata: uint8 ``[..., N, K/2]``.
        scale: uint8 ``[..., N, K/32]``, E8M0.
    """
    if scale.numel() and int(scale.max()) == mxfp4.SCALE_NAN:
        raise CheckpointError(
            "an MXFP4 scale is NaN",
            value=f"{int((scale == mxfp4.SCALE_NAN).sum())} of {scale.numel()} exponents are 255",
            limit="0 .. 254",
            remedy="The weights are damaged: get the checkpoint again.",
        )
    parts = mxfp4.to_nvfp4(qdata, scale)
    return mxfp4.dequantize(qdata, scale, torch.float32) if parts is None else parts
