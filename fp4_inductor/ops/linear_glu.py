"""``fp4.linear_glu(x, qdata, scale, global_scale, bias, act, prefill) -> act(gate) * up``, gate and up the halves of ``x @ W.T + bias``.

W is an NVFP4 ``[2 I, K]``: rows 0 .. I make the gate, rows I .. 2 I what it is multiplied with; ``global_scale`` is ``[]``,
or ``[2]`` for one each. Where one kernel does it
all, everything up to the result is float32; in two steps gate, up and act(gate) are rounded to ``x.dtype``, as in the
model's own code. Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, ShapeError
from ..formats import nvfp4
from . import linear
from .contract import OpContract, no_gradient, refuse_gradient
from .linear_siblings import members

# What kernels call them: ActivationCode.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
}


def glu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """``act(gate) * up``, as a model writes it."""
    return ACTIVATIONS[act](gate) * up


def halves(qdata: Tensor) -> list[int]:
    """The rows of gate and of up, as ``fp4.linear_siblings`` takes them."""
    inner = qdata.shape[0] // 2
    return [0, inner, inner, 2 * inner]


def reference(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu", prefill: str = "auto") -> Tensor:
    """float64 arithmetic on the dequantised weight, rounded once to ``x.dtype``."""
    check(x, qdata, scale, global_scale, bias, act, prefill)
    gate, up = (
        x.double() @ nvfp4.dequantize(q, s, g, torch.float32).double().mT + (0.0 if b is None else b.double())
        for q, s, g, b in members(qdata, scale, global_scale, bias, halves(qdata))
    )
    return (ACTIVATIONS[act](gate) * up).to(x.dtype)


def check(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, act: str = "silu", prefill: str = "auto") -> None:
    """As ``fp4.linear``, and two halves, and a known activation."""
    if global_scale.dim() and tuple(global_scale.shape) != (2,):
        raise ShapeError("fp4.linear_glu: global scales do not fit", value=tuple(global_scale.shape), limit="() or (2,)", remedy="One each, or one for both.")
    linear.check(x, qdata, scale, global_scale.select(0, 0) if global_scale.dim() else global_scale, bias, prefill)
    if qdata.shape[0] % 2:
        raise ShapeError("fp4.linear_glu takes gate and up", value=tuple(qdata.shape), limit="qdata [2 I, K/2]", remedy="Concatenate gate and up along N.")
    if act not in ACTIVATIONS:
        raise ConfigError("fp4.linear_glu: unknown activation", value=repr(act), limit=list(ACTIVATIONS), remedy="Call fp4.linear and apply it yourself.")


def fake(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu", prefill: str = "auto") -> Tensor:
    check(x, qdata, scale, global_scale, bias, act, prefill)
    return x.new_empty((*x.shape[:-1], qdata.shape[0] // 2))


def in_two_steps(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu", prefill: str = "auto") -> Tensor:
    """``fp4.linear``, then the product: what every device can do."""
    check(x, qdata, scale, global_scale, bias, act, prefill)
    inner = qdata.shape[0] // 2
    rows = [0, inner] if global_scale.dim() and inner else None
    y = torch.ops.fp4.linear(x, qdata, scale, global_scale if rows else global_scale.reshape(-1).select(0, 0), bias, prefill, rows)
    return glu(y[..., :inner], y[..., inner:], act)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, I, K): M in {0, 1}, off-tile I, K % 16 == 0 only
    shapes = (((16,), 64, 128), ((1,), 33, 48), ((0,), 8, 32), ((), 5, 16), ((2, 3), 17, 80), ((33,), 1, 64), ((5,), 130, 272), ((1, 1), 0, 32))
    for i, (lead, inner, k) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            q, s, g = nvfp4.quantize(torch.randn(2 * inner, k, device=device) / k**0.5)
            g = g * torch.tensor([1.0, 3.0], device=device) if i % 3 == 1 else g
            x = torch.randn(*lead, k, device=device).to(dtype)
            bias = torch.randn(2 * inner, device=device).to(dtype) if i % 2 else None
            act = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
            yield f"x {(*lead, k)} I {inner} {act} {dtype}", (x, q, s, g, bias, act)


CONTRACT = OpContract(
    name="linear_glu",
    schema='(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias=None, str act="silu", str prefill="auto") -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # Gate, up and act(gate) are rounded on the way in two steps.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1.5e-3},
    any_strides=True,
)
CONTRACT.implement("CPU", in_two_steps)
# Written by a graph pass behind autograd; a caller who wants gradients has fp4.linear.
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient("linear_glu", ctx, x=0, scale=2, global_scale=3, bias=4))
