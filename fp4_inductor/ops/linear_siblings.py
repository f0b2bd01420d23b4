"""``fp4.linear_siblings(x, qdata, scale, global_scale, bias, rows, prefill) -> [x @ W[a:b].T + bias[a:b], ...]``.

Several linear layers of one activation whose weights are rows of one NVFP4 ``[R, K]``. Member i is rows ``rows[2 i] ..
rows[2 i + 1]``, ascending; rows outside every member are padding. ``global_scale`` is ``[]``, or ``[S]`` with one for
each member. A graph pass writes it; where the kernel allows, it is one call by the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from ..formats import nvfp4
from . import linear
from .contract import OpContract, no_gradient, refuse_gradient


def members(
    qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """``(qdata, scale, global_scale, bias)`` of each member, views."""
    for i, (a, b) in enumerate(spans(rows)):
        g = global_scale.select(0, i) if global_scale.dim() else global_scale
        yield qdata.narrow(0, a, b - a), scale.narrow(0, a, b - a), g, None if bias is None else bias.narrow(0, a, b - a)


def spans(rows: Sequence[int]) -> list[tuple[int, int]]:
    """``[(start, stop), ...]``"""
    return list(zip(rows[::2], rows[1::2], strict=True))


def begins(rows: Sequence[int]) -> list[int] | None:
    """``rows`` as ``fp4.linear`` takes them: where the members begin, padding being the end of the one before it; None if one has no rows."""
    return [0, *rows[2::2]] if all(a < b for a, b in spans(rows)) else None


def reference(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int], prefill: str = "auto") -> list[Tensor]:
    """Each member as the reference of ``fp4.linear``."""
    check(x, qdata, scale, global_scale, bias, rows, prefill)
    return [linear.reference(x, *part, prefill) for part in members(qdata, scale, global_scale, bias, rows)]


def check(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int], prefill: str = "auto") -> None:
    """As ``fp4.linear``, and rows that lie in the weight, one behind the other."""
    ascending = list(rows) == sorted(rows) and len(rows) >= 2 and len(rows) % 2 == 0
    if qdata.dim() != 2 or not ascending or rows[0] < 0 or rows[-1] > qdata.shape[0]:
        raise ShapeError(
            "fp4.linear_siblings: rows do not lie in the weight",
            value=f"rows {list(rows)}, qdata {tuple(qdata.shape)}",
            limit="[start, stop, start, stop, ...] ascending within [R, K/2]",
            remedy="Call fp4.linear for each layer.",
        )
    if global_scale.dim() and tuple(global_scale.shape) != (len(rows) // 2,):
        raise ShapeError(
            "fp4.linear_siblings: global scales do not fit", value=tuple(global_scale.shape), limit=f"() or ({len(rows) // 2},)", remedy="One for each member."
        )
    linear.check(x, qdata, scale, global_scale.select(0, 0) if global_scale.dim() else global_scale, bias, prefill)


def fake(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int], prefill: str = "auto") -> list[Tensor]:
    check(x, qdata, scale, global_scale, bias, rows, prefill)
    return [x.new_empty((*x.shape[:-1], b - a)) for a, b in spans(rows)]


def one_by_one(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int], prefill: str = "auto") -> list[Tensor]:
    """One ``fp4.linear`` per member: what every device can do."""
    check(x, qdata, scale, global_scale, bias, rows, prefill)
    return [torch.ops.fp4.linear(x, *part, prefill) for part in members(qdata, scale, global_scale, bias, rows)]


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, sizes, K): padding between members, one member, an empty one, M in {0, 1}
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [((4,), (16, 32), 64), ((1,), (33, 5, 16), 48), ((0,), (8, 8), 32)]
    shapes += [((), (5,), 16), ((2, 3), (17, 0, 16), 80), ((33,), (1, 1), 112), ((1, 1), (130,), 272), ((5,), (16, 8, 8, 24), 48)]
    for i, (lead, sizes, k) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            rows: list[int] = []
            for n in sizes:
                start = -(-(rows[-1] if rows else 0) // 16) * 16
                rows += [start, start + n]
            q, s, g = nvfp4.quantize(torch.randn(rows[-1], k, device=device) / k**0.5)
            scales = g * torch.arange(1, len(sizes) + 1, device=device) if i % 2 else g
            bias = torch.randn(rows[-1], device=device).to(dtype) if i % 2 else None
            yield f"x {(*lead, k)} sizes {sizes} {dtype}", (torch.randn(*lead, k, device=device).to(dtype), q, s, scales, bias, rows)


CONTRACT = OpContract(
    name="linear_siblings",
    schema='(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias, int[] rows, str prefill="auto") -> Tensor[]',
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=linear.CONTRACT.tolerance,
    any_strides=True,
)
CONTRACT.implement("CompositeExplicitAutograd", one_by_one)
# Written by a graph pass behind autograd; a caller who wants gradients has fp4.linear.
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient("linear_siblings", ctx, x=0, scale=2, global_scale=3, bias=4))
