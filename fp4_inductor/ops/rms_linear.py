"""An RMSNorm between two linear products, as halves of both: ``fp4.linear_residual_squares`` and ``fp4.rms_scaled_linear``, ``_siblings`` and ``_glu``.

    y, z, squares = fp4.linear_residual_squares(x, qdata, scale, global_scale, bias, residual, norm_weight, norm_offset, prefill, rows)
    fp4.rms_scaled_linear(z, squares, eps, *rest) == fp4.linear(norm(y), *rest)
    norm(y) = y / sqrt(mean(y^2) + eps) * (norm_offset + norm_weight)

The root mean square of a row is a factor of all sums of products behind it. So the first product writes

    y        [..., N]               x @ W.T + bias + residual, rounded to the dtype of x
    z        [..., N]               y * (norm_offset + norm_weight), rounded to the dtype of x
    squares  [..., ceil(N / 16)]    float32: the sums of y^2, as it is rounded, over 16 columns each

and the second multiplies its sums by ``rsqrt(sum(squares) / K + eps)`` ahead of the bias and of an activation. z is rounded ahead of that factor, the norm's
result behind it. So y * norm_weight has to lie in the range of the dtype, which is not so of every model in float16. ``norm_weight [N]`` has the dtype of x;
``rest`` is that of the op without a norm. A graph pass writes these ops (``passes/rms_halves.py``).
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DTypeError, ShapeError
from . import linear, linear_epilogue, linear_glu, linear_siblings, norm_linear
from .contract import CONTRACTS, OpContract, no_gradient, refuse_gradient

SQUARED = 16  # columns of y of which ``squares`` has one sum
LEADING = 2  # arguments of the norm, behind z
IN_STEPS: dict[str, Callable] = {}  # what every device can do, by the names of the ops that read squares


class SquaresCall(NamedTuple):
    """The arguments of one call of ``fp4.linear_residual_squares``, in the order of the schema."""

    x: Any
    qdata: Any
    scale: Any
    global_scale: Any
    bias: Any
    residual: Any
    norm_weight: Any
    norm_offset: float
    prefill: str = "auto"
    rows: Sequence[int] | None = None

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> SquaresCall:
        """From the op's own arguments."""
        return cls(*args, **kwargs)

    @property
    def product(self) -> tuple[Any, ...]:
        """The arguments of ``fp4.linear_epilogue``, the first step."""
        return self.x, self.qdata, self.scale, self.global_scale, self.bias, "", None, self.residual, self.prefill, self.rows


def check(c: SquaresCall) -> None:
    """As ``fp4.linear_epilogue``, and a norm of its result."""
    linear_epilogue.check(linear_epilogue.EpilogueCall(*c.product))
    norm_linear.check("linear_residual_squares", c.residual, c.norm_weight)


def squares_of(y: Tensor) -> Tensor:
    """float32 ``[..., ceil(N / 16)]`` of ``y [..., N]``."""
    squares = F.pad(y.contiguous(), (0, -y.shape[-1] % SQUARED)).float().square()
    return squares.unflatten(-1, (squares.shape[-1] // SQUARED, SQUARED)).sum(-1)


def weighted(y: Tensor, norm_weight: Tensor, norm_offset: float) -> Tensor:
    """``y * (norm_offset + norm_weight)``, rounded once."""
    return (y.float() * (norm_offset + norm_weight.float())).to(y.dtype)


def reference(c: SquaresCall) -> tuple[Tensor, Tensor, Tensor]:
    """y of a product in float64, and what follows from it as it is rounded."""
    check(c)
    y = linear_epilogue.CONTRACT.reference(*c.product)
    return y, (y.double() * (c.norm_offset + c.norm_weight.double())).to(y.dtype), squares_of(y)


def fake(c: SquaresCall) -> tuple[Tensor, Tensor, Tensor]:
    check(c)
    lead, n = c.x.shape[:-1], c.qdata.shape[0]
    y = c.x.new_empty((*lead, n))
    return y, torch.empty_like(y), c.x.new_empty((*lead, -(-n // SQUARED)), dtype=torch.float32)


def in_steps(c: SquaresCall) -> tuple[Tensor, Tensor, Tensor]:
    """The product with its sum, then the rest: what every device can do."""
    check(c)
    y = torch.ops.fp4.linear_epilogue(*c.product)
    return y, weighted(y, c.norm_weight, c.norm_offset), squares_of(y)


def _in_turns(product: OpContract, device: torch.device) -> list[tuple[str, tuple]]:
    """The inputs of ``product``, of two dtypes for each shape, in one of them."""
    return [case for i, case in enumerate(product.inputs(device)) if (i + i // 2) % 2 == 0]


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for i, (description, (x, *weight)) in enumerate(_in_turns(linear.CONTRACT, device)):
        (q, s, g, bias, *_), rows = weight, weight[5] if len(weight) > 5 else None
        residual = torch.randn(*x.shape[:-1], q.shape[0], device=device).to(x.dtype)
        norm_weight = torch.randn(q.shape[0], device=device).to(x.dtype)
        yield description, (x, q, s, g, bias, residual, norm_weight, float(i % 3 == 1), "auto", *((rows,) if rows else ()))


SQUARES = OpContract(
    name="linear_residual_squares",
    schema="(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias, Tensor residual, Tensor norm_weight, float norm_offset, "
    'str prefill="auto", int[]? rows=None) -> (Tensor, Tensor, Tensor)',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # z is rounded twice, and follows from a y that may be the reference's neighbour, as squares do.
    tolerance=linear_epilogue.CONTRACT.tolerance,
    any_strides=True,
    struct=SquaresCall,
)
SQUARES.implement("CompositeExplicitAutograd", in_steps)
# Written by a graph pass behind autograd; a caller who wants gradients has fp4.linear and the norm.
SQUARES.differentiate(
    no_gradient, lambda ctx, inputs, output: refuse_gradient("linear_residual_squares", ctx, x=0, scale=2, global_scale=3, bias=4, residual=5, norm_weight=6)
)


def check_squares(op: str, z: Tensor, squares: Tensor) -> None:
    """Raise the typed error of squares that are not those of the rows of ``z``. Reads shapes and dtypes only."""
    shape = (*z.shape[:-1], -(-z.shape[-1] // SQUARED)) if z.dim() else ()
    if tuple(squares.shape) != shape or not z.dim():
        raise ShapeError(
            f"fp4.{op}: squares do not fit", value=f"squares {tuple(squares.shape)}, z {tuple(z.shape)}", limit=f"squares {shape} of z [..., K]",
            remedy="Pass the second and the third result of fp4.linear_residual_squares.",
        )  # fmt: skip
    if squares.dtype != torch.float32:
        raise DTypeError(f"fp4.{op}: squares dtype", value=squares.dtype, limit=torch.float32, remedy="Pass the third result of fp4.linear_residual_squares.")


def scaled(z: Tensor, squares: Tensor, eps: float) -> Tensor:
    """``z`` times the inverse root mean square of its rows, rounded once: the norm itself, but for where it was rounded before."""
    return (z.float() * torch.rsqrt(squares.contiguous().sum(-1, keepdim=True) / max(z.shape[-1], 1) + eps)).to(z.dtype)


def _scaled(product: OpContract) -> OpContract:
    """The contract of ``product``, an op whose first argument is ``x``, behind the first half of a norm."""
    name = f"rms_scaled_{product.name}"

    def reference(z: Tensor, squares: Tensor, eps: float, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, *rest, **options):
        """The scaled activations are not rounded: a kernel scales float32 sums."""
        check_squares(name, z, squares)
        root = (squares.double().sum(-1, keepdim=True) / max(z.shape[-1], 1) + eps).rsqrt()
        y = product.reference((z.double() * root).float(), qdata, scale, global_scale, None if bias is None else bias.float(), *rest, **options)
        return [one.to(z.dtype) for one in y] if isinstance(y, list) else y.to(z.dtype)

    def fake(z: Tensor, squares: Tensor, eps: float, *rest, **options):
        check_squares(name, z, squares)
        return product.fake(z, *rest, **options)

    def in_two_steps(z: Tensor, squares: Tensor, eps: float, *rest, **options):
        """The scaled activations, then the product: what every device can do."""
        check_squares(name, z, squares)
        return product.op(scaled(z, squares, eps), *rest, **options)

    def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
        for i, (description, (x, *rest)) in enumerate(_in_turns(product, device)):
            y = x * torch.rand(*x.shape[:-1], 1, device=device).add(0.5).to(x.dtype)
            z = weighted(y, torch.randn(x.shape[-1], device=device).to(x.dtype), 0.0)
            yield description, (z, squares_of(y), (1e-5, 1e-6)[i % 2], *rest)

    contract = OpContract(
        name=name,
        schema=product.schema.replace("(Tensor x, ", "(Tensor z, Tensor squares, float eps, ", 1),
        reference=reference,
        fake=fake,
        inputs=inputs,
        # In two steps activations are rounded once more.
        tolerance={dtype: max(2 * tolerance, 4e-6) for dtype, tolerance in product.tolerance.items()},
        any_strides=True,
    )
    contract.implement("CompositeExplicitAutograd", in_two_steps)
    IN_STEPS[name] = in_two_steps
    # Written by a graph pass behind autograd; a caller who wants gradients has the norm and the op without it.
    arguments = [argument.name for argument in contract.op._schema.arguments]
    frozen = {part: arguments.index(part) for part in ("z", "squares", "scale", "global_scale", "bias") if part in arguments}
    contract.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient(name, ctx, **frozen))
    return contract


LINEAR, LINEAR_SIBLINGS, LINEAR_GLU = map(_scaled, (linear.CONTRACT, linear_siblings.CONTRACT, linear_glu.CONTRACT))


def behind_squares(op: Any) -> Any:
    """``torch.ops.fp4.rms_scaled_<op>.default`` of ``torch.ops.fp4.<op>.default``."""
    return CONTRACTS[f"rms_scaled_{op._opname}"].op
