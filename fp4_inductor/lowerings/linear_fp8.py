"""fp4.linear_fp8 -> the kernel of one regime, by the same machinery as fp4.linear."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..formats import fp8
from . import linear

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.linear_fp8.default, lower)


def lower(x, weight, weight_scale, bias=None, prefill="auto"):
    """Lowering of ``fp4.linear_fp8``: x ``[..., K]`` -> ``[..., N]``."""
    return linear.product(fp4.linear_fp8.default, fp8.STORAGE, linear.Product(x, (weight, weight_scale), bias, prefill))
