"""``fp4.sparse_linear(x, values, meta, scale, global_scale, bias, prefill, rows) -> x @ W.T + bias``, W a 2:4-sparse NVFP4 ``[N, K]``.

``rows``: as of ``fp4.linear``, for several layers with a global scale each.

Metadata is not checked per call, which would cost a synchronisation on a GPU: whoever makes a weight checks it
(:func:`.sparse24.validate_meta`; the tensor, the module and the checkpoint reader do). Illegal metadata gives numbers
without meaning; no kernel reads or writes outside its operands for it.

Unlike ``fp4.linear``, a NaN or Inf activation need not reach an output that dropped its position: kernels for few rows
do not multiply by what was pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..formats import sparse24
from .contract import OpContract, refuse_gradient
from .linear import CONTRACT as DENSE
from .linear import SEVERAL, check_product, scales_apart
from .members import check_rows, dense, first_scale


def reference(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """float64 arithmetic on the dequantised weight, rounded once to ``x.dtype``."""
    check(x, values, meta, scale, global_scale, bias, prefill, rows)
    y = x.double() @ dense(sparse24.dequantize_sparse24, (values, meta, scale), global_scale, rows, torch.float32).double().mT
    return (y if bias is None else y + bias.double()).to(x.dtype)


def check(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, prefill: str = "auto", rows: Sequence[int] | None = None
) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    if rows:
        check_rows("sparse_linear", rows, global_scale, values)
    sparse24.check_parts(values, meta, scale, first_scale(global_scale, rows))
    check_product("sparse_linear", x, sparse24.STORAGE, (values, meta, scale, global_scale), bias, prefill)


def fake(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    check(x, values, meta, scale, global_scale, bias, prefill, rows)
    return x.new_empty((*x.shape[:-1], values.shape[0]))


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("sparse_linear", ctx, scale=3, global_scale=4)
    _, values, meta, scale, global_scale, bias, _, rows = inputs
    ctx.save_for_backward(values, meta, scale, global_scale)
    ctx.has_bias, ctx.rows = bias is not None, rows


def _backward(ctx, grad: Tensor):
    """Gradients of the activation and the bias; the quantized weight is frozen."""
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        *packed, global_scale = ctx.saved_tensors
        grad_x = grad @ dense(torch.ops.fp4.sparse_dequantize, packed, global_scale, ctx.rows, grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[5]:
        grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
    return grad_x, None, None, None, None, grad_bias, None, None


def random_weight(shape: tuple[int, ...], device: torch.device) -> sparse24.Sparse24Parts:
    """A weight of ``shape`` for input generators: the larger two of four of normal numbers."""
    w = torch.randn(shape, device=device) / max(shape[-1], 1) ** 0.5
    return sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, N, K): M in {0, 1}, off-tile N, K % 32 == 0 only, 1-D to 3-D activations
    shapes = (((16,), 64, 128), ((1,), 33, 96), ((0,), 8, 32), ((), 5, 32), ((2, 3), 17, 160), ((33,), 1, 64), ((1, 1), 97, 224), ((5,), 130, 288))
    for i, (lead, n, k) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16)[i // 2 % 2]
        bias = torch.randn(n, device=device).to(dtype) if i % 2 else None
        yield f"x {(*lead, k)} N {n} {dtype}", (torch.randn(*lead, k, device=device).to(dtype), *random_weight((n, k), device), bias)
    for i, (lead, rows, n, k) in enumerate(SEVERAL):
        dtype, k = (torch.float32, torch.bfloat16)[i % 2], 2 * k
        *packed, g = random_weight((n, k), device)
        args = (torch.randn(*lead, k, device=device).to(dtype), *packed, g * scales_apart(len(rows), device), None, "auto", rows)
        yield f"x {(*lead, k)} rows {rows} of {n} {dtype}", args


CONTRACT = OpContract(
    name="sparse_linear",
    schema='(Tensor x, Tensor values, Tensor meta, Tensor scale, Tensor global_scale, Tensor? bias=None, str prefill="auto", int[]? rows=None) -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=DENSE.tolerance,
)
CONTRACT.differentiate(_backward, _setup_context)
