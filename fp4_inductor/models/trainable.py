"""A packed FP4 layer as one that can be trained: its codes by straight-through, its block scales, its bias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import e2m1, nvfp4, sparse24
from ..modules import FP4Linear, Sparse24Linear
from ..modules.bits import BITS

_LEAST_SCALE = 2.0**-9  # of E4M3
_INSIDE = 0.95  # of the way from a code to where it would be rounded to another


class FakeFP4(torch.autograd.Function):
    """``round(w / scale) * scale`` on the E2M1 grid, where ``mask``, if there is one; its gradient as if there were no rounding (but saturation)."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, scale: Tensor, mask: Tensor | None) -> Tensor:
        s = scale.unsqueeze(-1)
        ratio = w.unflatten(-1, (-1, nvfp4.GROUP)) / s
        grid = e2m1.round_to_grid(ratio)
        inside = ratio.abs() <= e2m1.MAX
        # d/ds of round(w/s)*s is round(w/s) - w/s, and +-6 where it saturates.
        slope = grid - ratio * inside
        if mask is not None:
            kept = mask.unflatten(-1, (-1, nvfp4.GROUP))
            inside, slope = inside & kept, slope * kept
        ctx.save_for_backward(inside, slope.to(torch.bfloat16))
        w = (grid * s).flatten(-2)
        return w if mask is None else w * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        inside, slope = ctx.saved_tensors
        blocks = grad.unflatten(-1, (-1, nvfp4.GROUP))
        return (blocks * inside).flatten(-2), (blocks * slope).sum(-1), None


def rounded(values: Tensor, log_scale: Tensor, mask: Tensor | None, unit: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``: block scales rounded to E4M3, ``values`` of ``unit`` to E2M1, both with a straight-through gradient."""
    return (FakeFP4.apply(values, _rounded_scale(log_scale) / unit, mask) * (unit * global_scale)).to(dtype)


def _rounded_scale(log_scale: Tensor) -> Tensor:
    exact = log_scale.exp2().clamp(_LEAST_SCALE, nvfp4.SCALE_MAX)
    return exact + (exact.to(nvfp4.SCALE_DTYPE).float() - exact).detach()


def compiled_rounding(layers: list[Trainable]) -> str:
    """Let ``layers``, on a GPU, round by one compiled kernel each way instead of by 40 of torch's. Returns why that cannot be; empty: they do."""
    compiled = torch.compile(rounded, dynamic=True)
    try:
        for sparse in {m.mask is not None for m in layers}:
            m = min((m for m in layers if (m.mask is not None) == sparse), key=lambda m: m.values.numel())
            with torch.enable_grad():
                torch.autograd.grad(compiled(m.values, m.log_scale, m.mask, m.unit, m.layer.global_scale, m.dtype).sum(), (m.values, m.log_scale))
    except Exception as error:  # no compiler, no Triton, or what torch.compile raises
        return f"the rounding could not be compiled ({type(error).__name__}: {error})".splitlines()[0]
    for m in layers:
        m.rounded = compiled
    return ""


class Trainable(nn.Module):
    """An FP4Linear or a Sparse24Linear whose values, block scales and bias are float32 Parameters; the first forward pass is that of the layer.

    Args:
        layer: unchanged until :meth:`pack`.
        dense: ``[N, K]``, what the layer was made from: a value starts there where that is rounded to its code, else at its code, which was chosen
            for the sake of others and is not to change at once. None: values start spread over what is rounded to their codes, so that
            some are about to change in every step.
    """

    mask: Tensor | None
    unit: Tensor

    def __init__(self, layer: FP4Linear, dense: Tensor | None = None):
        super().__init__()
        self.rounded = rounded
        self.layer, self.in_features, self.out_features, self.dtype = layer, layer.in_features, layer.out_features, layer.dtype
        self.register_buffer("mask", sparse24.mask_of(layer.meta) if isinstance(layer, Sparse24Linear) else None, persistent=False)
        scale = layer.scale.float().clamp_min(_LEAST_SCALE)
        units = scale.unsqueeze(-1) * layer.global_scale
        codes = e2m1.round_to_grid(self._blocks(layer.dequantize(torch.float32)) / units)  # the division left them a bit beside it
        size = codes.abs()
        up, down = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0)), torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
        if dense is not None:
            off = self._blocks(dense.detach().float()) / units - codes
            outward = torch.where(codes < 0, -off, off)  # codes but zero have more room on one side than on the other
            fits = torch.where(size == 0, off.abs() < _INSIDE * 0.25, (outward > -_INSIDE * down) & (outward < _INSIDE * up))
            at = torch.where(fits, codes + off, codes).clamp(-e2m1.MAX, e2m1.MAX)
        else:
            spread = torch.rand(codes.shape, generator=torch.Generator().manual_seed(0)).to(codes.device) * 2 * _INSIDE - _INSIDE
            at = codes + codes.sign() * torch.where(spread > 0, spread * up, spread * down) + (size == 0) * 0.25 * spread
        values = (at * scale.unsqueeze(-1)).flatten(-2)
        if self.mask is not None:
            values *= self.mask
        # In units of their root mean square (times the global scale, which stays), so that one rate suits all layers, and all are one update of the optimizer.
        self.register_buffer("unit", root_mean_square(values, self.mask), persistent=False)
        self.values = nn.Parameter(values / self.unit)
        self.log_scale = nn.Parameter(scale.log2())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float().clone())

    def _blocks(self, w: Tensor) -> Tensor:
        return F.pad(w, (0, self.layer.padding)).unflatten(-1, (-1, nvfp4.GROUP))

    @property
    def weight(self) -> Tensor:
        """The weight ``[N, K]`` of this forward pass."""
        return self.rounded(self.values, self.log_scale, self.mask, self.unit, self.layer.global_scale, self.dtype)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @torch.no_grad()
    def pack(self) -> FP4Linear:
        """The layer, with what was learned written into its buffers."""
        scale = _rounded_scale(self.log_scale)
        qdata = e2m1.pack(e2m1.encode((self.values.unflatten(-1, (-1, nvfp4.GROUP)) / (scale / self.unit).unsqueeze(-1)).flatten(-2)))
        stored = scale.to(nvfp4.SCALE_DTYPE)
        first = (qdata,) if self.mask is None else sparse24.compress(qdata, self.mask)
        write_parts(self.layer, (*first, stored, self.layer.global_scale))
        if self.bias is not None and self.layer.bias is not None:
            self.layer.bias.copy_(self.bias)
        return self.layer


def root_mean_square(t: Tensor, mask: Tensor | None = None) -> Tensor:
    """float32 ``[]``: of what ``mask`` keeps; 1 where that is 0."""
    count = t.numel() if mask is None else mask.sum()
    size = (t.detach().float().square().sum() / count).sqrt()
    return torch.where(size > 0, size, 1.0)


def write_parts(layer: FP4Linear, parts: tuple[Tensor, ...]) -> None:
    """Copy ``parts`` into the buffers of ``layer``, which stay where they are: a sibling's are rows of one that it shares."""
    for own, part in zip(layer.parts(), parts, strict=True):
        bits = BITS[own.dtype.itemsize]
        own.view(bits).copy_(part.view(bits))
