"""Host side of ``fp4.router`` on CUDA: two launches, no host read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops import router as contract
from .. import host
from ..topk.launch import tile
from .triton_router import router_choice, router_scores

# Up to so many tokens a GEMV's form is faster than the library's product: every program reads all of them.
MOST_TOKENS = 8


def router(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores as ``x.dtype``, then one program a token."""
    contract.check(x, weight, bias, k, form, dtype)
    (t, h), e = x.shape, weight.shape[0]
    weights, ids = x.new_empty((t, k), dtype=dtype), x.new_empty((t, k), dtype=torch.int64)
    if t == 0:
        return weights, ids
    x, weight, bias = host.aligned(x), host.aligned(weight), None if bias is None else host.aligned(bias)  # the library's bits follow strides, too
    pdl = host.arch(x.device) >= 90
    launch = host.launched_early(pdl)
    with torch.cuda.device(x.device):
        if t <= MOST_TOKENS:
            scores = x.new_empty((t, e))
            router_scores[(e,)](x, weight, bias, scores, t, h, HAS_BIAS=bias is not None, PDL=pdl, **scores_tile(t, h), **launch)
        else:
            scores = F.linear(x, weight, bias)
        router_choice[(t,)](scores, weights, ids, e, K=k, FORM=contract.FORMS.index(form), PDL=pdl, **tile(e, k), **launch)
    return weights, ids


def scores_tile(t: int, h: int) -> dict[str, int]:
    """At most 64 sums a thread."""
    rows = 1 << (t - 1).bit_length()
    return {"ROWS": rows, "BLOCK": min(max(512, 1 << (h - 1).bit_length()), 8192 // max(rows, 2)), "num_warps": 4}
