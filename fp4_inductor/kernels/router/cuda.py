"""cuda_router: every expert's score, each token's choice and its weights in one launch, with the norm in front of it. Source: ``csrc/moe/router.cu``.

M of its problem is the tokens, N the experts, K the width of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.router import FORMS
from .. import host, params
from ..forms import Launches, Library
from ..kernel import MEASURED, Kernel, On

LIBRARY = Library("moe/router.cu", finish=None)
NAME = "cuda_router"


class Norm(NamedTuple):
    """An RMSNorm in front of a router."""

    weight: Tensor
    eps: float
    offset: float


def fields(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False, norm: Norm | None = None
) -> dict[str, Any]:
    """Of :class:`params.RouterParams`, but for y, ids and stream."""
    rows = host.aligned(weight)
    tensors: dict[str, Tensor | None] = dict(x=host.aligned(x), weight=rows, bias=None if bias is None else bias.contiguous())
    more: dict[str, Any] = {}
    if norm is not None:
        more = dict(
            norm_weight=host.aligned(norm.weight), normed=torch.empty_like(x, memory_format=torch.contiguous_format), eps=norm.eps, norm_offset=norm.offset
        )
    sizes = dict(tokens=x.shape[0], experts=weight.shape[0], K=x.shape[1], top_k=k)
    types = dict(dtype=params.FLOATS[x.dtype], weights_type=params.FLOATS[dtype], form=FORMS.index(form))
    types["early"] = int(early and rows is weight and (norm is None or more["norm_weight"] is norm.weight))  # a copy is written right before
    return tensors | more | sizes | types


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False, norm: Norm | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """``x`` normalised, if there is a norm, and the weights and ids of ``fp4.router``.

    Raises:
        KernelError: the launch was refused.
    """
    from .. import csrc  # which reads the list of kernels

    given = fields(x, weight, bias, k, form, dtype, early, norm)
    weights, ids = x.new_empty((x.shape[0], k), dtype=dtype), x.new_empty((x.shape[0], k), dtype=torch.int64)
    csrc.launch(LIBRARY, params.RouterParams, given | dict(ids=ids), weights, host.arch(x.device), f"x {tuple(x.shape)}, {weight.shape[0]} experts, k = {k}")
    return given.get("normed"), weights, ids


_WHY = "one launch in the place of two"
KERNELS = (
    Kernel(
        "router", NAME, "router", (On(90, 90, MEASURED, _WHY),), most_k=8192, most_n=128, batch=(1 << 16, "each token is computed by itself"),
        form=Launches("router.cuda:launch", LIBRARY),
    ),
)  # fmt: skip
