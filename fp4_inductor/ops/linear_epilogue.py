"""``fp4.linear_epilogue(x, qdata, scale, global_scale, bias, act, mul, residual, prefill, rows) -> act(x @ W.T + bias) * mul + residual``.

W is an NVFP4 ``[N, K]``, ``rows`` and ``global_scale`` as of ``fp4.linear``; ``act`` is ``""`` or one of ``fp4.linear_glu``'s; ``mul`` and
``residual`` are ``[..., N]`` or None. Where one kernel does it all, everything up to the result is float32; else every step is rounded to
``x.dtype``, as in the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from . import linear
from .contract import OpContract, no_gradient, refuse_gradient
from .linear_glu import ACTIVATIONS
from .members import dense


class EpilogueCall(NamedTuple):
    """The arguments of one call, in the order of the schema."""

    x: Tensor
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None = None
    act: str = ""
    mul: Tensor | None = None
    residual: Tensor | None = None
    prefill: str = "auto"
    rows: Sequence[int] | None = None

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> EpilogueCall:
        """From the op's own arguments."""
        return cls(*args, **kwargs)

    @property
    def product(self) -> tuple[Any, ...]:
        """The arguments of ``fp4.linear``, the first step."""
        return self.x, self.qdata, self.scale, self.global_scale, self.bias, self.prefill, self.rows


def reference(c: EpilogueCall) -> Tensor:
    """float64 arithmetic on the dequantised weight, rounded once to ``x.dtype``."""
    check(c)
    y = c.x.double() @ dense(nvfp4.dequantize, (c.qdata, c.scale), c.global_scale, c.rows, torch.float32).double().mT
    y = y if c.bias is None else y + c.bias.double()
    return finish(y, c.act, None if c.mul is None else c.mul.double(), None if c.residual is None else c.residual.double()).to(c.x.dtype)


def finish(y: Tensor, act: str, mul: Tensor | None, residual: Tensor | None) -> Tensor:
    """``act(y) * mul + residual``."""
    y = ACTIVATIONS[act](y) if act else y
    y = y if mul is None else y * mul
    return y if residual is None else y + residual


def check(c: EpilogueCall) -> None:
    """As ``fp4.linear``, and a known activation, and operands of the result's shape and dtype."""
    linear.check(*c.product)
    if c.act and c.act not in ACTIVATIONS:
        raise ConfigError(
            "fp4.linear_epilogue: unknown activation", value=repr(c.act), limit=["", *ACTIVATIONS], remedy="Call fp4.linear and apply it yourself."
        )
    x, shape = c.x, (*c.x.shape[:-1], c.qdata.shape[0])
    for name, t in (("mul", c.mul), ("residual", c.residual)):
        if t is None:
            continue
        if tuple(t.shape) != shape:
            raise ShapeError(f"fp4.linear_epilogue: {name} does not fit", value=tuple(t.shape), limit=shape, remedy="Expand it to the shape of the result.")
        if t.dtype != x.dtype:
            raise DTypeError(f"fp4.linear_epilogue: {name} dtype", value=t.dtype, limit=x.dtype, remedy="Cast it with .to(dtype).")
        if t.device != x.device:
            raise DeviceError(f"fp4.linear_epilogue: {name} is elsewhere", value=str(t.device), limit=str(x.device), remedy="Move it with .to(device).")


def fake(c: EpilogueCall) -> Tensor:
    check(c)
    return c.x.new_empty((*c.x.shape[:-1], c.qdata.shape[0]))


def in_steps(c: EpilogueCall) -> Tensor:
    """``fp4.linear``, then the rest: what every device can do."""
    check(c)
    return finish(torch.ops.fp4.linear(*c.product), c.act, c.mul, c.residual)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, N, K): M in {0, 1}, off-tile N, K % 16 == 0 only
    shapes = (((16,), 64, 128), ((1,), 33, 48), ((0,), 8, 32), ((), 5, 16), ((2, 3), 17, 80), ((33,), 1, 64), ((5,), 130, 272), ((1, 1), 0, 32))
    for i, (lead, n, k) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            w = nvfp4.quantize(torch.randn(n, k, device=device) / k**0.5)
            x, bias, mul, residual = (torch.randn(*size, device=device).to(dtype) for size in ((*lead, k), (n,), (*lead, n), (*lead, n)))
            act = ["", *ACTIVATIONS][i % (len(ACTIVATIONS) + 1)]
            chosen = (bias if i % 2 else None, act, mul if i % 3 else None, residual if i % 4 != 1 else None)
            yield f"x {(*lead, k)} N {n} {act or 'no act'} {dtype}", (x, *w, *chosen)
    for lead, rows, n, k in linear.SEVERAL:
        q, s, g = nvfp4.quantize(torch.randn(n, k, device=device) / k**0.5)
        x, residual = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((*lead, k), (*lead, n)))
        more = (None, "silu", None, residual, "auto", rows)
        yield f"x {(*lead, k)} rows {rows} of {n}", (x, q, s, g * linear.scales_apart(len(rows), device), *more)


CONTRACT = OpContract(
    name="linear_epilogue",
    schema='(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias=None, str act="", Tensor? mul=None, Tensor? residual=None, '
    'str prefill="auto", int[]? rows=None) -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # Every step is rounded on the way.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3},
    any_strides=True,
    struct=EpilogueCall,
)
CONTRACT.implement("CPU", in_steps)
# Written by a graph pass behind autograd; a caller who wants gradients has fp4.linear.
CONTRACT.differentiate(
    no_gradient, lambda ctx, inputs, output: refuse_gradient("linear_epilogue", ctx, x=0, scale=2, global_scale=3, bias=4, mul=6, residual=7)
)
