"""fp4.sparse_linear -> the kernel of one regime, by the same machinery as fp4.linear."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..formats import sparse24
from . import linear

fp4 = torch.ops.fp4


def register() -> None:
    inductor.register(fp4.sparse_linear.default, lower)


def lower(x, values, meta, scale, global_scale, bias=None, prefill="auto", rows=None):
    """Lowering of ``fp4.sparse_linear``: x ``[..., K]`` -> ``[..., N]``."""
    call = linear.Product(x, (values, meta, scale, global_scale), bias, prefill, rows)
    return linear.product(fp4.sparse_linear.default, sparse24.STORAGE, call)
