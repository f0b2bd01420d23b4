"""How far a quantized weight is from the dense one: the figure of a layer's row in the report."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import nvfp4
from ..kernels.quantize.cpu import rounding_error
from ..modules import FP4Linear

_CHUNK = 1 << 21  # weights compared at once
LOUD = 0.5  # error of a dense NVFP4 or FP8 weight, from which a report warns: rounding to nearest costs a fifth of that


class RoundingError:
    """Sums over the parts of one weight, on its device.

    The squares are summed in float64: in float32 those of weights around 1e-23 are zero, and those above 1e19 infinite.
    """

    def __init__(self) -> None:
        self.error: Tensor | float = 0.0
        self.norm: Tensor | float = 0.0
        self.lost: Tensor | int = 0
        self.alive: Tensor | int = 0

    def add(self, w: Tensor, d: Tensor, suspect: bool) -> None:
        """``w`` and what it became, both float32 ``[N, K]`` on one device; ``d`` is overwritten. ``suspect``: :func:`may_have_lost`."""
        if suspect:
            extra = -w.shape[-1] % nvfp4.GROUP
            alive, kept = (F.pad(t, (0, extra)).unflatten(-1, (-1, nvfp4.GROUP)).count_nonzero(-1) for t in (w, d))
            self.alive = self.alive + (alive > 0).sum()
            self.lost = self.lost + ((alive > 0) & (kept == 0)).sum()
        wide = torch.float32 if w.device.type == "mps" else torch.float64
        self.norm = self.norm + torch.linalg.vector_norm(w, dtype=wide).square()
        self.error = self.error + torch.linalg.vector_norm(d.sub_(w), dtype=wide).square()

    def add_packed(self, w: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> bool:
        """As :meth:`add`, of NVFP4 without a suspect block, by one pass in C; False (and nothing is added) where that cannot read ``w``."""
        found = rounding_error(w, qdata, scale, global_scale)
        if found is not None:
            self.error, self.norm = self.error + found[0], self.norm + found[1]
        return found is not None

    def relative(self) -> float:
        """``|W - dequantized| / |W|`` (Frobenius), 0 for an all-zero weight.

        One outlier can be all of ``|W|`` and at the same time make all else zero, which this quotient would not show. Where blocks
        of 16 weights that are not zero became zero altogether, the result is at least the root of their share.
        """
        error, norm, lost, alive = (float(t) for t in (self.error, self.norm, self.lost, self.alive))
        return max(math.sqrt(error / norm) if norm > 0 else 0.0, math.sqrt(lost / alive) if alive else 0.0)


def relative_error(dense: Tensor, layer: FP4Linear) -> float:
    """:meth:`RoundingError.relative` of a layer over ``dense`` ``[N, K]``."""
    suspect = may_have_lost(layer.scale)
    sums = RoundingError()
    if not suspect and type(layer) is FP4Linear and sums.add_packed(dense, layer.qdata, layer.scale, layer.global_scale):
        return sums.relative()
    step = max(1, _CHUNK // max(dense.shape[1], 1))
    for start in range(0, dense.shape[0], step):
        rows = slice(start, start + step)
        w, d = dense[rows].float(), layer.dequantize(torch.float32, rows)
        sums.add(w.to(d.device), d, suspect)
    return sums.relative()


def may_have_lost(scale: Tensor) -> bool:
    """Whether a block of 16 weights that are not zero can have become zero: only one with the smallest block scale, or with none, can."""
    return scale.dtype == nvfp4.SCALE_DTYPE and bool((scale.view(torch.uint8) <= 1).any())
