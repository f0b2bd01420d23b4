"""Global scales that divide (compressed-tensors) and that multiply (here, ModelOpt, torchao): from one to the other.

``1 / x`` is rounded in both directions, and the two libraries multiply in another order, so a weight could differ by one
bfloat16 step. There are only 16 x 127 products of a code and a block scale: they are all compared, and of the float32
neighbours of ``1 / x`` the nearest one that gives the same bfloat16 for every product is taken. There is one for almost
every scale; amax / 2688 of some bfloat16 amax is the exception (2 of 128 mantissas; amax / 1536: 12 of 128), where products
lie exactly between two bfloat16 numbers. Then the neighbour with the fewest differences is taken, each of one bfloat16 step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import e2m1, nvfp4

_NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)
_AT_ONCE = 4096  # scales whose products are compared at once: 16 MB of float32
_AT_ONCE_CPU = 256  # what stays in a cache


def _products(device: torch.device) -> tuple[Tensor, Tensor]:
    """Every positive code as ``[1, 8]`` and every block scale as ``[127, 1]``, float32."""
    scales = torch.arange(0x7F, dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE).float()
    return torch.tensor(e2m1.MAGNITUDES, device=device)[None], scales[:, None]


def multiplied(g: Tensor) -> Tensor:
    """``[..., 127, 8]``: every product as this package decodes it: ``(code * scale) * g`` rounded to bfloat16."""
    code, scale = _products(g.device)
    return ((code * scale) * g[..., None, None]).bfloat16()


def divided(g: Tensor) -> Tensor:
    """``[..., 127, 8]``: every product as compressed-tensors decodes it: ``code * (scale / g)`` rounded to bfloat16."""
    code, scale = _products(g.device)
    return (code * (scale / g[..., None, None])).bfloat16()


def reciprocal_scale(global_scale: Tensor, *, dividing: bool = True) -> Tensor:
    """The other form of global scales, so that the weights they decode stay the same.

    compressed-tensors divides by a global scale, this package and ModelOpt multiply with it.

    Args:
        global_scale: float32 of any shape, on any device; nothing is read back to the host.
        dividing: they divide and the result multiplies; False: the other way round.

    Returns:
        A float32 tensor of the same shape. An element is ``1 / g``, or the neighbour of it that gives the same bfloat16 weights, or
        the fewest other ones. Of a scale that is not finite and positive it is ``1 / g``, which whoever checks the result refuses.
    """
    on_cpu = global_scale.device.type == "cpu"
    with torch.no_grad():
        parts = [_reciprocal(g, dividing, on_cpu) for g in global_scale.detach().reshape(-1).split(_AT_ONCE_CPU if on_cpu else _AT_ONCE)]
        return torch.cat(parts).reshape(global_scale.shape)


def _reciprocal(g: Tensor, dividing: bool, on_cpu: bool) -> Tensor:
    """Of ``g [G]``."""
    ours, theirs = (multiplied, divided) if dividing else (divided, multiplied)
    near = g.reciprocal()
    want = theirs(g)
    best, fewest = near.clone(), _different(ours(near), want)
    for step in _NEIGHBOURS[1:]:
        left: Any = slice(None)
        if on_cpu:  # most are exact at once; a GPU compares all of them again, for to ask which are left would make the host wait
            left = fewest.nonzero().squeeze(-1)
            if left.numel() == 0:
                break
        candidate = (near[left].view(torch.int32) + step).view(torch.float32)
        different = _different(ours(candidate), want[left])
        better = different < fewest[left]
        best[left] = torch.where(better, candidate, best[left])
        fewest[left] = torch.where(better, different, fewest[left])
    sound = torch.isfinite(near) & (near > 0) & torch.isfinite(g) & (g > 0)
    return torch.where(sound, best, near)


def _different(products: Tensor, want: Tensor) -> Tensor:
    """``[G]``: how many of the products of each scale are not those of ``want``."""
    return (products != want).sum((-2, -1))


def is_exact(g: Tensor, dividing: Tensor) -> Tensor:
    """bool ``[...]``: do a multiplying and a dividing global scale give the same bfloat16 weights, whatever the codes and block scales?"""
    pairs = zip(g.reshape(-1).split(_AT_ONCE), dividing.reshape(-1).split(_AT_ONCE), strict=True)
    return torch.cat([(multiplied(a) == divided(b)).all(-1).all(-1) for a, b in pairs]).reshape(g.shape)
