"""``fp4.linear(x, qdata, scale, global_scale, bias, prefill, rows) -> x @ W.T + bias``, W an NVFP4 ``[N, K]``.

The op dispatches itself by the number of rows of ``x`` wherever a compiler has not already done so.

``rows`` makes W the rows of several layers, each with a global scale of its own, ``global_scale [S]``: they are the rows at which the
layers begin, the first at 0. The result is theirs side by side. Without, ``global_scale`` is ``[]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from ..config import Prefill, WeightOnly
from ..errors import ConfigError, DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from ..formats.storage import Storage
from .contract import OpContract, refuse_gradient
from .members import check_rows, dense, first_scale

WEIGHT_ONLY: tuple[str, ...] = get_args(WeightOnly)
PREFILL: tuple[str, ...] = get_args(Prefill)  # also "nvfp4", which rounds the activations of many rows: linear layers with a dense NVFP4 weight only


def reference(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    """float64 arithmetic on the dequantised weight, rounded once to ``x.dtype``."""
    check(x, qdata, scale, global_scale, bias, prefill, rows)
    y = x.double() @ dense(nvfp4.dequantize, (qdata, scale), global_scale, rows, torch.float32).double().mT
    return (y if bias is None else y + bias.double()).to(x.dtype)


def check(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, prefill: str = "auto", rows: Sequence[int] | None = None) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    if rows:
        check_rows("linear", rows, global_scale, qdata)
    nvfp4.check_parts(qdata, scale, first_scale(global_scale, rows))
    check_product("linear", x, nvfp4.STORAGE, (qdata, scale, global_scale), bias, prefill, PREFILL)


def check_product(
    op: str, x: Tensor, storage: Storage, weight: tuple[Tensor, ...], bias: Tensor | None, prefill: str, accepted: tuple[str, ...] = WEIGHT_ONLY
) -> None:
    """What every ``fp4.<op>(x, *weight, bias, prefill)`` asks of its arguments, the parts of the weight being in order."""
    first = storage.parts[0]
    shape = storage.logical(weight[0].shape)
    if len(shape) != 2:
        raise ShapeError(
            f"fp4.{op} takes one matrix",
            value=tuple(weight[0].shape),
            limit=f"{first.name} [N, K/{first.k}]",
            remedy=f"Experts [E, N, K/{first.k}] go through fp4.bmm.",
        )
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError(f"fp4.{op}: activation dtype", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    if x.dim() < 1 or x.shape[-1] != shape[1]:
        raise ShapeError(
            f"fp4.{op}: activation and weight disagree on K",
            value=f"x {tuple(x.shape)}",
            limit=f"[..., {shape[1]}]",
            remedy="Pad the activation if K of the weight was padded.",
        )
    if bias is not None:
        if bias.dim() != 1 or bias.shape[0] != shape[0]:
            raise ShapeError(f"fp4.{op}: bias does not fit N", value=tuple(bias.shape), limit=f"({shape[0]},)", remedy="The bias has one entry per output.")
        if bias.dtype != x.dtype:
            raise DTypeError(f"fp4.{op}: bias dtype", value=bias.dtype, limit=x.dtype, remedy="Cast the module with .to(dtype).")
    if prefill not in accepted:
        raise ConfigError(f"fp4.{op}: unknown prefill", value=repr(prefill), limit=list(accepted), remedy="NVFP4Config describes them.")
    devices = {t.device for t in (x, *weight, bias) if t is not None}
    if len(devices) > 1:
        raise DeviceError(
            f"fp4.{op}: tensors on different devices",
            value=sorted(map(str, devices)),
            limit="one device",
            remedy="Move the layer or the activation with .to(device).",
        )


def fake(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> Tensor:
    check(x, qdata, scale, global_scale, bias, prefill, rows)
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def without_products(x: Tensor, n: int, bias: Tensor | None) -> Tensor:
    """The result ``[..., n]`` where M, N or K is 0: no product is summed, the bias alone remains."""
    out = x.new_zeros((*x.shape[:-1], n))
    return out if bias is None else out + bias


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("linear", ctx, scale=2, global_scale=3)
    _, qdata, scale, global_scale, bias, _, rows = inputs
    ctx.save_for_backward(qdata, scale, global_scale)
    ctx.has_bias, ctx.rows = bias is not None, rows


def _backward(ctx, grad: Tensor):
    """Gradients of the activation and the bias; the quantized weight is frozen."""
    qdata, scale, global_scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dense(torch.ops.fp4.dequantize, (qdata, scale), global_scale, ctx.rows, grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[4]:
        grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
    return grad_x, None, None, None, grad_bias, None, None


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, N, K): M in {0, 1}, off-tile N, K % 16 == 0 only, 1-D to 3-D activations
    shapes = (((16,), 64, 128), ((1,), 33, 48), ((0,), 8, 32), ((), 5, 16), ((2, 3), 17, 80), ((33,), 1, 64), ((1, 1), 96, 112), ((5,), 130, 272))
    for i, (lead, n, k) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            w = nvfp4.quantize(torch.randn(n, k, device=device) / k**0.5)
            x = torch.randn(*lead, k, device=device).to(dtype)
            bias = torch.randn(n, device=device).to(dtype) if i % 2 else None
            yield f"x {(*lead, k)} N {n} {dtype}", (x, *w, bias)
    for lead, rows, n, k in SEVERAL:
        for dtype in (torch.float32, torch.bfloat16):
            q, s, g = nvfp4.quantize(torch.randn(n, k, device=device) / k**0.5)
            x, bias = torch.randn(*lead, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
            yield f"x {(*lead, k)} rows {rows} of {n} {dtype}", (x, q, s, g * scales_apart(len(rows), device), bias if n % 2 else None, "auto", rows)


# Of calls with several global scales: leading dims of x, the rows at which they begin, N, K.
SEVERAL: tuple[tuple[tuple[int, ...], list[int], int, int], ...] = (
    ((16,), [0, 32, 48], 64, 128), ((1,), [0, 7], 33, 48), ((0,), [0, 4], 8, 32), ((), [0, 1, 2], 5, 16), ((2, 3), [0], 17, 80),
    ((33,), [0, 16, 24, 40, 41], 57, 64),
)  # fmt: skip


def scales_apart(count: int, device: torch.device) -> Tensor:
    """Factors that make global scales differ: 1, 3, 9, ..."""
    return 3.0 ** torch.arange(count, device=device)


CONTRACT = OpContract(
    name="linear",
    schema='(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias=None, str prefill="auto", int[]? rows=None) -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # bf16 / fp16: operands exact, float32 accumulation, one rounding. float32: tensor cores are not used.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
    any_strides=True,
)
CONTRACT.differentiate(_backward, _setup_context)
