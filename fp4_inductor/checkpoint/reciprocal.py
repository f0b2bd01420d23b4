"""Global scales that divide (compressed-tensors) and that multiply (here, ModelOpt, torchao): from one to the other.

``1 / x`` is rounded in both directions, and the two libraries multiply in another order, so a weight could differ by one
bfloat16 step. There are only 16 x 127 products of a code and a block scale: they are all compared, and of the float32
neighbours of ``1 / x`` the nearest one that gives the same bfloat16 for every product is taken. There is one for almost
every scale; amax / 2688 of some bfloat16 amax is the exception (2 of 128 mantissas; amax / 1536: 12 of 128), where products
lie exactly between two bfloat16 numbers. Then the neighbour with the fewest differences is taken, each of one bfloat16 step.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..formats import e2m1, nvfp4

_NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)


@functools.cache
def _products() -> tuple[Tensor, Tensor]:
    """Every positive code as ``[1, 8]`` and every block scale as ``[127, 1]``, float32."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE).float()
    return torch.tensor(e2m1.MAGNITUDES)[None], scales[:, None]


def multiplied(g: Tensor) -> Tensor:
    """Every product as this package decodes it: ``(code * scale) * g`` rounded to bfloat16."""
    code, scale = _products()
    return ((code * scale) * g).bfloat16()


def divided(g: Tensor) -> Tensor:
    """Every product as compressed-tensors decodes it: ``code * (scale / g)`` rounded to bfloat16."""
    code, scale = _products()
    return (code * (scale / g)).bfloat16()


def reciprocal(g: Tensor, *, dividing: bool = True) -> Tensor:
    """The other form of a global scale.

    Args:
        g: float32 ``[]``; ``dividing``: it divides and the result multiplies, else the other way round.

    Returns:
        float32 ``[]``: ``1 / g``, or the neighbour of it that gives the same bfloat16 weights, or the fewest other ones.
    """
    near = g.reciprocal()
    if not bool(torch.isfinite(near) & (near > 0) & torch.isfinite(g) & (g > 0)):
        return near
    ours, theirs = (multiplied, divided) if dividing else (divided, multiplied)
    want = theirs(g)
    best, fewest = near, want.numel()
    for step in _NEIGHBOURS:
        candidate = (near.view(torch.int32) + step).view(torch.float32)
        different = int((ours(candidate) != want).sum())
        if different < fewest:
            best, fewest = candidate, different
        if not different:
            break
    return best


def is_exact(g: Tensor, dividing: Tensor) -> bool:
    """Do a multiplying and a dividing global scale give the same bfloat16 weights, whatever the codes and block scales?"""
    return torch.equal(multiplied(g), divided(dividing))
