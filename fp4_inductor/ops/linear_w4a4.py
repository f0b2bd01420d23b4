"""``fp4.linear_w4a4(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype) -> x @ W.T + bias``, both NVFP4.

x ``[M, K]`` as :mod:`.quantize_rows_nvfp4` writes it, W ``[N, K]`` as ever. ``fp4.linear`` with ``prefill="nvfp4"`` is
:func:`rounded` where M is large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from . import quantize_rows_nvfp4
from .contract import OpContract, no_gradient, refuse_gradient
from .dequantize import check_dtype, dequantize_rows
from .members import members, spans


def reference(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """float64 arithmetic on both dequantised operands, rounded once to ``dtype``."""
    check(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype)
    y = quantize_rows_nvfp4.dequantize(x_qdata, x_scale, row_scale).double() @ nvfp4.dequantize(qdata, scale, global_scale, torch.float32).double().T
    return (y if bias is None else y + bias.double()).to(dtype)


def check(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    nvfp4.check_parts(qdata, scale, global_scale)
    nvfp4.check_parts(x_qdata, x_scale, row_scale.new_empty(()))
    check_dtype(dtype)
    if qdata.dim() != 2 or x_qdata.dim() != 2 or x_qdata.shape[1] != qdata.shape[1] or row_scale.dim() != 2 or tuple(row_scale.shape[1:]) != (1,):
        raise ShapeError(
            "fp4.linear_w4a4: shapes do not fit",
            value=[tuple(t.shape) for t in (x_qdata, x_scale, row_scale, qdata, scale)],
            limit="[M, K/2], [M, K/16], [M, 1], [N, K/2], [N, K/16]",
            remedy="fp4.quantize_rows_nvfp4 makes the first two.",
        )
    if row_scale.shape[0] != x_qdata.shape[0]:
        raise ShapeError(
            "fp4.linear_w4a4: row_scale does not fit M", value=tuple(row_scale.shape), limit=f"({x_qdata.shape[0]}, 1)", remedy="One per row of x."
        )
    if row_scale.dtype != torch.float32:
        raise DTypeError("fp4.linear_w4a4: row_scale dtype", value=row_scale.dtype, limit=torch.float32, remedy="row_scales(x) gives it.")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != qdata.shape[0]):
        raise ShapeError("fp4.linear_w4a4: bias does not fit N", value=tuple(bias.shape), limit=f"({qdata.shape[0]},)", remedy="One entry per output.")
    if bias is not None and bias.dtype != dtype:
        raise DTypeError("fp4.linear_w4a4: bias dtype", value=bias.dtype, limit=dtype, remedy="Cast it with .to(dtype).")
    devices = {t.device for t in (x_qdata, row_scale, qdata, bias) if t is not None}
    if len(devices) > 1:
        raise DeviceError(
            "fp4.linear_w4a4: tensors on different devices", value=sorted(map(str, devices)), limit="one device", remedy="Move them with .to(device)."
        )


def fake(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    check(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype)
    return x_qdata.new_empty((x_qdata.shape[0], qdata.shape[0]), dtype=dtype)


def rounded(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, rows: Sequence[int] | None = None) -> Tensor:
    """``x [M, K]`` rounded to NVFP4 token by token, times the weight, in ``x.dtype``; ``rows``: as of ``fp4.linear``."""
    return by_members(codes_of(x), qdata, scale, global_scale, bias, x.dtype, rows)


def codes_of(x: Tensor) -> tuple[Tensor, ...]:
    """``x [M, K]`` in NVFP4: codes, block scales, a scale a row."""
    row_scale = quantize_rows_nvfp4.row_scales(x)
    return *torch.ops.fp4.quantize_rows_nvfp4(x, row_scale), row_scale


def by_members(
    codes: tuple[Tensor, ...], qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: Sequence[int] | None
) -> Tensor:
    """``fp4.linear_w4a4`` of ``codes``, a call for each global scale; ``rows``: as of ``fp4.linear``."""
    if not rows:
        return torch.ops.fp4.linear_w4a4(*codes, qdata, scale, global_scale, bias, dtype)
    biases = [None if bias is None else bias[a:b] for a, b in spans(rows, qdata.shape[0])]
    parts = zip(members((qdata, scale), global_scale, rows), biases, strict=True)
    return torch.cat([torch.ops.fp4.linear_w4a4(*codes, *part, b, dtype) for part, b in parts], -1)


def dequantized(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Without FP4 tensor cores: both operands in ``dtype`` (transient), the library GEMM. Right, and slower than not rounding the activations.

    ``global_scale``: ``[]``, or ``[N]`` for one each.
    """
    x = dequantize_rows(x_qdata, x_scale, row_scale.flatten(), dtype)
    w = torch.ops.fp4.dequantize if global_scale.dim() == 0 else dequantize_rows
    return torch.nn.functional.linear(x, w(qdata, scale, global_scale, dtype), bias)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # M in {0, 1}, off-tile N, K % 16 == 0 only
    for i, (m, n, k) in enumerate(((16, 64, 128), (1, 33, 48), (0, 8, 32), (3, 5, 16), (6, 17, 80), (33, 1, 64), (1, 96, 112), (5, 130, 272))):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(m, k, device=device).to(dtype)
            rows = quantize_rows_nvfp4.row_scales(x)
            bias = torch.randn(n, device=device).to(dtype) if i % 2 else None
            w = nvfp4.quantize(torch.randn(n, k, device=device) / k**0.5)
            yield f"M {m} N {n} K {k} {dtype}", (*quantize_rows_nvfp4.reference(x, rows), rows, *w, bias, dtype)


CONTRACT = OpContract(
    name="linear_w4a4",
    schema="(Tensor x_qdata, Tensor x_scale, Tensor row_scale, Tensor qdata, Tensor scale, Tensor global_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    # Products are exact and summed in float32. Without FP4 tensor cores both operands are rounded to dtype besides.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1.5e-3},
    any_strides=True,
)
# Its activations are codes; a caller who wants gradients has fp4.linear, which lets them pass the rounding.
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient("linear_w4a4", ctx, x_scale=1, row_scale=2, scale=4, global_scale=5, bias=6))
