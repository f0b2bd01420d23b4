"""``fp4.topk(x [T, E], k) -> (values [T, k], indices int64 [T, k])``: the experts of each token, the best first.

``torch.topk(x, k)`` over a router's few scores, in one small kernel instead of two. NaN counts as the largest; of equal scores the lower
index comes first, and no index twice, which ``torch.topk`` leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract, no_gradient, refuse_gradient

MOST_SCORES, MOST_CHOSEN = 1024, 32


def reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable sort. NaN is returned as it is in ``x``."""
    check(x, k)
    order = x.sort(stable=True, dim=-1, descending=True).indices[:, :k].clone(memory_format=torch.contiguous_format)
    return x.gather(-1, order), order


def check(x: Tensor, k: int) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes and dtypes only."""
    if x.dim() != 2 or x.shape[1] > MOST_SCORES:
        raise ShapeError("fp4.topk takes a router's scores", value=tuple(x.shape), limit=f"[T, E], E up to {MOST_SCORES}", remedy="Call torch.topk.")
    if not 0 <= k <= min(x.shape[1], MOST_CHOSEN):
        raise ShapeError("fp4.topk: k", value=k, limit=f"0 to E = {x.shape[1]}, at most {MOST_CHOSEN}", remedy="Call torch.topk.")
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("fp4.topk: dtype of the scores", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast them with .to(dtype).")


def fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check(x, k)
    return x.new_empty((x.shape[0], k)), x.new_empty((x.shape[0], k), dtype=torch.int64)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for (t, e), k in zip(((4, 64), (1, 33), (3, 128), (0, 20), (17, 60), (5, 1000), (2, 1), (6, 100)), (8, 2, 8, 4, 6, 32, 1, 0), strict=True):
        yield f"{(t, e)} k = {k}", (torch.randn(t, e, device=device), k)


def _setup_context(ctx, inputs, output):
    refuse_gradient("topk", ctx, x=0)


CONTRACT = OpContract(
    name="topk",
    schema="(Tensor x, int k) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
)
CONTRACT.implement("CPU", lambda x, k: reference(x.contiguous(), k))
CONTRACT.differentiate(no_gradient, _setup_context)
