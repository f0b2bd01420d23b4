"""scores + choice: ``fp4.router`` in two launches, for every call: scores by a GEMV's form or the library's product, then one program a token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.router import FORMS
from .. import host
from ..forms import Launches
from ..kernel import ANY, BY_LIBRARY, MEASURED, Kernel, On

# Up to so many tokens a GEMV's form is faster than the library's product: every program reads all of them.
MOST_TOKENS = 8


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False) -> tuple[Tensor, Tensor]:
    """Scores as ``x.dtype``, then the choice. No host read. ``early`` makes no difference."""
    from ..topk.launch import tile  # which import Triton: this file is read where there is none
    from . import triton_router

    (t, h), e = x.shape, weight.shape[0]
    weights, ids = x.new_empty((t, k), dtype=dtype), x.new_empty((t, k), dtype=torch.int64)
    x, weight, bias = host.aligned(x), host.aligned(weight), None if bias is None else host.aligned(bias)  # the library's bits follow strides, too
    pdl = host.arch(x.device) >= 90
    del early
    begun = host.launched_early(pdl)
    with torch.cuda.device_of(x):
        if t <= MOST_TOKENS:
            scores = x.new_empty((t, e))
            triton_router.router_scores[(e,)](x, weight, bias, scores, t, h, HAS_BIAS=bias is not None, PDL=pdl, **scores_tile(t, h), **begun)
        else:
            scores = F.linear(x, weight, bias)
        triton_router.router_choice[(t,)](scores, weights, ids, e, K=k, FORM=FORMS.index(form), PDL=pdl, **tile(e, k), **begun)
    return weights, ids


def scores_tile(t: int, h: int) -> dict[str, int]:
    """At most 64 sums a thread."""
    rows = 1 << (t - 1).bit_length()
    return {"ROWS": rows, "BLOCK": min(max(512, 1 << (h - 1).bit_length()), 8192 // max(rows, 2)), "num_warps": 4}


_WHY = "scores of up to 8 tokens by a kernel that reads each row of the router once, else by the library; then the choice"
KERNELS = (
    Kernel(
        "router", "scores + choice", "library", (On(0, 129, MEASURED, _WHY),), ANY, k_multiple=1, batch=BY_LIBRARY,
        form=Launches("router.two_launches:launch"),
    ),
)  # fmt: skip
