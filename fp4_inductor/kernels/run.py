"""Eager calls on CUDA: a kernel runs by its form. No synchronisation, no host read, current stream."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError
from ..formats.packing import MAX_SCALES
from ..ops.linear import without_products
from ..ops.linear_w4a4 import codes_of
from ..ops.members import spans
from . import csrc, host, select
from .forms import Composed, Epilogue, Form, Library, Options, Problem, Triton
from .kernel import Kernel

Bounds = tuple[int, ...]  # the rows at which the second and the third global scale begin


def product(op: str, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, prefill: str, rows: Sequence[int] | None = None) -> Tensor:
    """``x [..., K]`` times a weight of N rows by the kernel of ``op`` that ``select.plan`` gives for this M.

    Args:
        weight: its parts, all ``[N, ...]``, and its scales: one, one for each row, or one for each of ``rows``.
        rows: the rows at which those with a global scale each begin.
    """
    if x.device.type != "cuda":
        raise DeviceError(f"the CUDA kernel of fp4.{op} got tensors elsewhere", value=str(x.device), limit="cuda", remedy="Move them with .to('cuda').")
    n, k, lead = weight[0].shape[0], x.shape[-1], x.shape[:-1]
    m = math.prod(lead)
    if m == 0 or n == 0 or k == 0:
        return without_products(x, n, bias)
    if rows and len(rows) > MAX_SCALES:
        return torch.cat([product(op, x, part, b, prefill, own) for part, b, own in _groups(weight, bias, rows, n)], -1)
    bounds = tuple(rows or ())[1:]
    if rows:
        weight = (*weight[:-1], weight[-1].contiguous() if bounds else weight[-1].reshape(()))
    span = host.row_for(op, x, m, n, k, prefill, counts=select.Counts(scales=1 + len(bounds)) if bounds else select.ONE)
    return launched(span.implementation, x.reshape(m, k), weight, bias, bounds).view(*lead, n)


def _groups(weight: tuple[Tensor, ...], bias: Tensor | None, rows: Sequence[int], n: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None, list[int]]]:
    """``(weight, bias, rows)`` of as many members at a time as one kernel takes, views."""
    for i in range(0, len(rows), MAX_SCALES):
        own = rows[i : i + MAX_SCALES]
        start, count = own[0], spans(rows, n)[i + len(own) - 1][1] - own[0]
        part = (*(t.narrow(0, start, count) for t in weight[:-1]), weight[-1].narrow(0, i, len(own)))
        yield part, None if bias is None else bias.narrow(0, start, count), [begin - start for begin in own]


def launched(kernel: Kernel, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, bounds: Bounds = ()) -> Tensor:
    """``x [M, K] @ W.T + bias`` by ``kernel``."""
    if isinstance(kernel.form, Library):  # its operator sees to device, strides and alignment
        return by_library(kernel.form, x, weight, bias, bounds)
    with torch.cuda.device_of(x):
        bias = None if bias is None else host.aligned(bias)
        x, weight = host.aligned(x), (*(host.aligned(t) for t in weight[:-1]), weight[-1])
        if kernel.launch is not None:
            return kernel.launch(x, *weight, bias)
        return by_form(kernel.form, x, weight, bias, bounds)


def by_form(form: Form | None, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None = None, bounds: Bounds = (), tile: Any = None) -> Tensor:
    """``x [M, K] @ W.T + bias``; tensors are contiguous and aligned to 16 bytes. ``tile``: one of the kernel's; None: its own choice."""
    if isinstance(form, Library):
        return by_library(form, x, weight, bias, bounds, tile or ())
    problem = Problem(x.shape[0], weight[0].shape[0], x.shape[1], host.arch(x.device), x.dtype, bounds)
    activations = _activations(form.rounded, x) if isinstance(form, Composed) else (x,)
    return multiplied(form, activations, weight, problem, bias, tile)


def multiplied(form: object, activations: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None, tile: Any = None) -> Tensor:
    """``[M, N]`` in ``p.dtype`` from activations as the kernel takes them, by one Triton launch or by torch's operators."""
    if isinstance(form, Triton):
        return host.plus(by_triton(form, (*activations, *weight), p, tile), bias)
    if isinstance(form, Composed):
        return form.product(activations, weight, p, bias)
    raise TypeError(f"a kernel of this form serves no product: {form}")


def _activations(rounded: str, x: Tensor) -> tuple[Tensor, ...]:
    if rounded == "fp8":
        return torch.ops.fp4.quantize_rows_fp8.default(x)
    return codes_of(x) if rounded else (x,)


def by_library(form: Library, x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None, bounds: Bounds = (), tile: Sequence[int] = ()) -> Tensor:
    """By the operator of ``csrc/``, which adds the bias itself.

    A product of E4M3 activations may fetch weights while the kernel before it runs: that is the one that rounds, which writes none, and which
    lets the product begin only after all kernels before it have ended.
    """
    activations = torch.ops.fp4.quantize_rows_fp8.default(x, form.lane_order) if form.fp8 else (x,)
    name = form.for_scales(1 + len(bounds)).name
    return csrc.call(name, activations, weight[:-1], weight[-1], bias, host.arch(x.device), Options(tile, Epilogue(bounds), early=form.fp8))


def by_triton(form: Triton, inputs: tuple[Tensor, ...], p: Problem, tile: Any = None) -> Tensor:
    """``[M, N]`` in ``p.dtype`` by one launch."""
    grid, constants = _prepared(form, p) if tile is None else _constants(form, p, tile)
    y = torch.empty(p.m, p.n, dtype=p.dtype, device=inputs[0].device)
    sizes = [inputs[i].shape[dim] * times // over for i, dim, times, over in form.places]
    # Scales are read as bytes: Triton refuses the very mention of a pointer to E4M3 before sm_89.
    tensors = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in inputs]
    form.source()[grid](*tensors, *form.missing, y, *sizes, **constants)
    return y


@functools.lru_cache(maxsize=4096)
def _prepared(form: Triton, p: Problem) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and constants of the kernel's own tile, computed once for each kind of call: they would cost a call of one row a third of its host time."""
    return _constants(form, p, form.tile(p))


def _constants(form: Triton, p: Problem, tile: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    constants = form.constants(tile, p)
    return form.grid(p.m, p.n, constants, cdiv=_cdiv), constants


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
