"""``fp4.linear_fp8(x, weight, weight_scale, bias, prefill) -> x @ (weight * weight_scale[:, None]).T + bias``, weight E4M3 ``[N, K]``.

Few rows: the activation stays in its dtype. Many rows with ``prefill`` other than ``"bf16"``: FP8 tensor cores, the
activation rounded to E4M3 per row (:mod:`.quantize_rows_fp8`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError
from ..formats import nvfp4
from . import quantize_rows_fp8
from .contract import OpContract, refuse_gradient
from .dequantize_fp8 import rowwise_product
from .linear import WEIGHT_ONLY, without_products

_CHUNK = 1 << 24  # weights rounded at once: bounds the temporaries to about 130 MB


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(float8_e4m3fn [N, K], float32 [N])``: the largest magnitude of a row becomes 448."""
    if weight.dim() != 2:
        raise ShapeError("an FP8 weight is a matrix", value=tuple(weight.shape), limit="[N, K]", remedy="Reshape it to [N, K].")
    if weight.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("an FP8 weight comes from high precision", value=weight.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    parts = [quantize_rows_fp8.reference(rows) for rows in weight.split(max(1, _CHUNK // max(weight.shape[1], 1)))]
    w = torch.cat([q.view(torch.uint8) for q, _ in parts]).view(torch.float8_e4m3fn)
    scale = torch.cat([s for _, s in parts]).flatten()
    if not bool(torch.isfinite(scale).all()):
        raise NonFiniteError("an FP8 weight holds NaN or Inf", value="a scale that is not finite", limit="finite values", remedy="Repair the weight.")
    return w, scale


def reference(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto") -> Tensor:
    """float64 arithmetic, rounded once to ``x.dtype``."""
    check(x, weight, weight_scale, bias, prefill)
    y = x.double() @ (weight.double() * weight_scale.double()[:, None]).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def check(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, prefill: str = "auto") -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    if weight.dtype != torch.float8_e4m3fn or weight_scale.dtype != torch.float32:
        raise DTypeError(
            "fp4.linear_fp8: weight dtypes", value=f"{weight.dtype}, {weight_scale.dtype}", limit="float8_e4m3fn, float32", remedy="Use FP8Linear.from_weight."
        )
    if x.dtype not in nvfp4.HIGH_PRECISION or (bias is not None and bias.dtype != x.dtype):
        raise DTypeError(
            "fp4.linear_fp8: activation and bias dtype",
            value=f"{x.dtype}, {None if bias is None else bias.dtype}",
            limit=f"one of {list(nvfp4.HIGH_PRECISION)} for both",
            remedy="Cast with .to(dtype).",
        )
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1] and weight_scale.dim() == 1 and weight_scale.shape[0] == weight.shape[0]
    if not fits or (bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0])):
        raise ShapeError(
            "fp4.linear_fp8: shapes do not fit",
            value=[None if t is None else tuple(t.shape) for t in (x, weight, weight_scale, bias)],
            limit="x [..., K], weight [N, K], weight_scale [N], bias [N]",
            remedy="FP8Linear.from_weight makes the last three.",
        )
    if prefill not in WEIGHT_ONLY:
        raise ConfigError("fp4.linear_fp8: unknown prefill", value=repr(prefill), limit=list(WEIGHT_ONLY), remedy="NVFP4Config describes them.")
    devices = {t.device for t in (x, weight, weight_scale, bias) if t is not None}
    if len(devices) > 1:
        raise DeviceError(
            "fp4.linear_fp8: tensors on different devices", value=sorted(map(str, devices)), limit="one device", remedy="Move the layer with .to(device)."
        )


def fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto") -> Tensor:
    check(x, weight, weight_scale, bias, prefill)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def transient(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``x [M, K]`` times a transient weight in its dtype; E4M3 is exact there, so only the product is rounded."""
    return ((x @ weight.to(x.dtype).t()).float() * weight_scale).to(x.dtype)


def scaled(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``x [M, K]`` rounded to E4M3 per row, times the weight on FP8 tensor cores."""
    x8, x_scale = torch.ops.fp4.quantize_rows_fp8(x)
    return rowwise_product(x8, x_scale, weight, weight_scale.unsqueeze(0), x.dtype)


def by_blocks(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto") -> Tensor:
    """On a CPU: float32 products of blocks of rows that fit the cache."""
    check(x, weight, weight_scale, bias, prefill)
    (n, k), m = weight.shape, x.shape[:-1].numel()
    if m == 0 or n == 0 or k == 0:
        return without_products(x, n, bias)
    # Contiguous: a strided GEMM may sum in another order.
    rows, weight = x.reshape(m, k).float().contiguous(), weight.contiguous()
    out = torch.empty(m, n)
    step = max(1, (1 << 19) // k)
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        torch.mm(rows, weight[block].float().t(), out=out[:, block])
    out *= weight_scale
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("linear_fp8", ctx, weight=1, weight_scale=2)
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.has_bias = inputs[3] is not None


def _backward(ctx, grad: Tensor):
    """Gradients of the activation and the bias; the weight is frozen."""
    weight, weight_scale = ctx.saved_tensors
    grad_x = (grad.float() * weight_scale).to(grad.dtype) @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
    grad_bias = None
    if ctx.has_bias and ctx.needs_input_grad[3]:
        grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
    return grad_x, None, None, grad_bias, None


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    shapes = (((16,), 64, 128), ((1,), 33, 48), ((0,), 8, 32), ((), 5, 16), ((2, 3), 17, 80), ((33,), 1, 50), ((5,), 130, 272), ((1, 1), 96, 112))
    for i, (lead, n, k) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            w, scale = quantize_weight(torch.randn(n, k, device=device) / k**0.5)
            bias = torch.randn(n, device=device).to(dtype) if i % 2 else None
            # "bf16": the activation stays in its dtype on every device, which the tolerance is about
            yield f"x {(*lead, k)} N {n} {dtype}", (torch.randn(*lead, k, device=device).to(dtype), w, scale, bias, "bf16")


CONTRACT = OpContract(
    name="linear_fp8",
    schema='(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, str prefill="auto") -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
    any_strides=True,
)
CONTRACT.implement("CPU", by_blocks)
CONTRACT.differentiate(_backward, _setup_context)
