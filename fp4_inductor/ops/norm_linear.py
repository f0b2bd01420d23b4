"""``fp4.norm_linear``, ``_siblings``, ``_glu`` and ``_epilogue``: the RMSNorm of a row, and the linear layer that reads it, in one op.

    fp4.norm_linear(x, norm_weight, eps, norm_offset, *rest) == fp4.linear(norm(x), *rest)
    norm(x) = x / sqrt(mean(x^2) + eps) * (norm_offset + norm_weight)

``x [..., K]`` is what the norm reads, ``norm_weight [K]`` has its dtype; ``norm_offset`` is 0, or 1 where a model stores the weight minus one
(Gemma). The norm is computed in float32 and rounded once, to ``x.dtype``; ``rest`` is that of the op of the same name without a norm.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError
from . import linear, linear_epilogue, linear_glu, linear_siblings
from .contract import CONTRACTS, OpContract, no_gradient, refuse_gradient

LEADING = 3  # arguments of the norm, behind x


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float) -> Tensor:
    """The norm of each row of ``x [..., K]`` in float32, rounded once to ``x.dtype``."""
    x32 = x.contiguous().float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * (norm_offset + norm_weight.float())).to(x.dtype)


def rms_norm_reference(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float) -> Tensor:
    """As :func:`rms_norm`, in float64 arithmetic."""
    x64 = x.double()
    return (x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * (norm_offset + norm_weight.double())).to(x.dtype)


def check(op: str, x: Tensor, norm_weight: Tensor) -> None:
    """Raise the typed error of a norm that has no meaning. Reads shapes, dtypes and devices only."""
    if x.dim() < 1 or norm_weight.dim() != 1 or norm_weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"fp4.{op}: the norm's weight does not fit",
            value=f"norm_weight {tuple(norm_weight.shape)}, x {tuple(x.shape)}",
            limit="norm_weight [K], x [..., K]",
            remedy="The norm has one weight for each entry of a row.",
        )
    if norm_weight.dtype != x.dtype:
        raise DTypeError(f"fp4.{op}: norm_weight dtype", value=norm_weight.dtype, limit=x.dtype, remedy="Cast it with .to(dtype).")
    if norm_weight.device != x.device:
        raise DeviceError(f"fp4.{op}: norm_weight is elsewhere", value=str(norm_weight.device), limit=str(x.device), remedy="Move it with .to(device).")


def inputs_behind(cases: Iterable[tuple[str, tuple]]) -> Iterator[tuple[str, tuple]]:
    """The inputs of an op whose first argument is ``x``, with those of a norm behind ``x``."""
    for i, (description, (x, *rest)) in enumerate(cases):
        norm_weight = torch.randn(x.shape[-1], device=x.device).to(x.dtype)
        eps, norm_offset = (1e-5, 1e-6)[i % 2], float(i % 3 == 1)
        yield f"{description} eps {eps} offset {norm_offset}", (x, norm_weight, eps, norm_offset, *rest)


def _behind_a_norm(product: OpContract) -> OpContract:
    """The contract of ``product``, an op whose first argument is ``x``, with a norm in front of it."""
    name = f"norm_{product.name}"

    def reference(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest, **options):
        check(name, x, norm_weight)
        return product.reference(rms_norm_reference(x, norm_weight, eps, norm_offset), *rest, **options)

    def fake(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest, **options):
        check(name, x, norm_weight)
        return product.fake(x, *rest, **options)

    def in_two_steps(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest, **options):
        """The norm, then the product: what every device can do."""
        check(name, x, norm_weight)
        return product.op(rms_norm(x, norm_weight, eps, norm_offset), *rest, **options)

    contract = OpContract(
        name=name,
        schema=product.schema.replace("(Tensor x, ", "(Tensor x, Tensor norm_weight, float eps, float norm_offset, ", 1),
        reference=reference,
        fake=fake,
        inputs=lambda device: inputs_behind(product.inputs(device)),
        # The norm's float32 sum, and the few entries of a row that it rounds to the neighbour of what the reference has.
        tolerance={dtype: max(tolerance, 4e-6) for dtype, tolerance in product.tolerance.items()},
        any_strides=True,
    )
    contract.implement("CompositeExplicitAutograd", in_two_steps)
    # Written by a graph pass behind autograd; a caller who wants gradients has the norm and the op without it.
    arguments = [argument.name for argument in contract.op._schema.arguments]
    frozen = {part: arguments.index(part) for part in ("x", "norm_weight", "scale", "global_scale", "bias", "mul", "residual") if part in arguments}
    contract.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient(name, ctx, **frozen))
    return contract


LINEAR, LINEAR_SIBLINGS, LINEAR_GLU, LINEAR_EPILOGUE = map(
    _behind_a_norm, (linear.CONTRACT, linear_siblings.CONTRACT, linear_glu.CONTRACT, linear_epilogue.CONTRACT)
)


def with_norm(op: Any) -> Any:
    """``torch.ops.fp4.norm_<op>.default`` of ``torch.ops.fp4.<op>.default``."""
    return CONTRACTS[f"norm_{op._opname}"].op
