"""``fp4.bmm(x [E, M, K], qdata [E, N, K/2], scale, global_scale [E]) -> [E, M, N]``: one matrix per batch entry."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract, refuse_gradient


def reference(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """float64 arithmetic on the dequantised experts, rounded once to ``x.dtype``."""
    check(x, qdata, scale, global_scale)
    return (x.double() @ nvfp4.dequantize(qdata, scale, global_scale, torch.float32).double().mT).to(x.dtype)


def check(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    nvfp4.check_parts(qdata, scale, global_scale)
    if x.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("fp4.bmm: activation dtype", value=x.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    if x.dim() != 3 or qdata.dim() != 3 or x.shape[0] != qdata.shape[0] or x.shape[-1] != qdata.shape[-1] * 2:
        raise ShapeError(
            "fp4.bmm takes x [E, M, K] and qdata [E, N, K/2]",
            value=f"x {tuple(x.shape)}, qdata {tuple(qdata.shape)}",
            limit="the same E and K",
            remedy="Expand or select the experts first.",
        )
    if len({t.device for t in (x, qdata, scale, global_scale)}) > 1:
        raise DeviceError(
            "fp4.bmm: tensors on different devices",
            value=[str(t.device) for t in (x, qdata, scale, global_scale)],
            limit="one device",
            remedy="Move the weight or the activation with .to(device).",
        )


def fake(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    check(x, qdata, scale, global_scale)
    return x.new_empty((x.shape[0], x.shape[1], qdata.shape[1]))


def by_matrix(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """First version for every device: one ``fp4.linear`` per matrix. The MoE kernels replace it."""
    check(x, qdata, scale, global_scale)
    out = x.new_empty((x.shape[0], x.shape[1], qdata.shape[1]))
    g = global_scale.reshape(-1)
    for e in range(x.shape[0]):
        out[e] = torch.ops.fp4.linear(x[e], qdata[e], scale[e], g[e])
    return out


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("bmm", ctx, scale=2, global_scale=3)
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, grad: Tensor):
    """Gradient of the activation; the quantized weights are frozen."""
    return torch.bmm(grad, torch.ops.fp4.dequantize(*ctx.saved_tensors, grad.dtype)), None, None, None


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (E, M, N, K): no expert, no row, one row, off-tile M and N, K % 16 == 0 only
    shapes = ((1, 1, 16, 32), (3, 5, 7, 48), (2, 0, 8, 16), (0, 2, 8, 16), (4, 17, 33, 80), (2, 1, 1, 64), (5, 3, 130, 16), (2, 64, 96, 112))
    for e, m, n, k in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(e, m, k, device=device).to(dtype)
            yield f"E{e} M{m} N{n} K{k} {dtype}", (x, *nvfp4.quantize(torch.randn(e, n, k, device=device) / k**0.5))


CONTRACT = OpContract(
    name="bmm",
    schema="(Tensor x, Tensor qdata, Tensor scale, Tensor global_scale) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
)
CONTRACT.implement("CompositeExplicitAutograd", by_matrix)
CONTRACT.differentiate(_backward, _setup_context)
