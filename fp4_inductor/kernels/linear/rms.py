"""The halves of an RMSNorm on CUDA (:mod:`fp4_inductor.ops.rms_linear`): by cuda_table, if it serves this M, else in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats.packing import MAX_SCALES
from ...ops import rms_linear
from ...ops.linear_siblings import begins, spans
from .. import csrc, host, select
from ..forms import Epilogue, Options


def linear_residual_squares(c: rms_linear.SquaresCall) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, z, squares)`` for ``x [..., K]``."""
    rms_linear.check(c)
    name = _library("linear_residual_squares", c.x, c.qdata, c.prefill, len(c.rows or ()))
    if not name:
        return rms_linear.in_steps(c)
    lead, n = c.x.shape[:-1], c.qdata.shape[0]
    then = Epilogue(starts=tuple(c.rows or ())[1:], residual=c.residual.reshape(-1, n))
    options = Options(then=then, half=(c.norm_weight, c.norm_offset))
    results = csrc.call(name, _rows(c.x), (c.qdata, c.scale), _scales(c.global_scale, c.rows), c.bias, host.arch(c.x.device), options)
    y, z, squares = (t.view(*lead, t.shape[1]) for t in results)
    return y, z, squares


def rms_scaled_linear(
    z: Tensor, squares: Tensor, eps: float, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, prefill: str = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``[..., N]`` for ``z [..., K]``."""
    rms_linear.LINEAR.fake(z, squares, eps, qdata, scale, global_scale, bias, prefill, rows)
    name = _library("rms_scaled_linear", z, qdata, prefill, len(rows or ()))
    if not name:
        return rms_linear.IN_STEPS["rms_scaled_linear"](z, squares, eps, qdata, scale, global_scale, bias, prefill, rows)
    return _scaled(name, z, squares, eps, (qdata, scale, _scales(global_scale, rows)), bias, Epilogue(starts=tuple(rows or ())[1:]))


def rms_scaled_linear_siblings(
    z: Tensor, squares: Tensor, eps: float, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, rows: Sequence[int], prefill: str = "auto"
) -> list[Tensor]:
    """``[..., N]`` of each member for ``z [..., K]``."""
    rms_linear.LINEAR_SIBLINGS.fake(z, squares, eps, qdata, scale, global_scale, bias, rows, prefill)
    begin = begins(rows) if global_scale.dim() else []
    name = _library("rms_scaled_linear", z, qdata, prefill, len(begin)) if begin is not None else ""
    if not name:
        return rms_linear.IN_STEPS["rms_scaled_linear_siblings"](z, squares, eps, qdata, scale, global_scale, bias, rows, prefill)
    y = _scaled(name, z, squares, eps, (qdata, scale, _scales(global_scale, begin)), bias, Epilogue(starts=tuple(begin or ())[1:]))
    return [y[..., a:b].clone(memory_format=torch.contiguous_format) for a, b in spans(rows)]  # an op's results are no views of one tensor


def rms_scaled_linear_glu(
    z: Tensor, squares: Tensor, eps: float, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, act: str = "silu",
    prefill: str = "auto",
) -> Tensor:  # fmt: skip
    """``act(gate) * up`` for ``z [..., K]``."""
    rms_linear.LINEAR_GLU.fake(z, squares, eps, qdata, scale, global_scale, bias, act, prefill)
    name = _library("rms_scaled_linear_glu", z, qdata, prefill, 1)
    if not name:
        return rms_linear.IN_STEPS["rms_scaled_linear_glu"](z, squares, eps, qdata, scale, global_scale, bias, act, prefill)
    then = Epilogue(starts=(qdata.shape[0] // 2,) if global_scale.dim() else (), act=act)
    return _scaled(name, z, squares, eps, (qdata, scale, global_scale), bias, then)


def _library(op: str, x: Tensor, qdata: Tensor, prefill: str, scales: int) -> str:
    """The operator of ``csrc/`` that serves this M; empty: none does."""
    m, n, k = math.prod(x.shape[:-1]), qdata.shape[0], qdata.shape[1] * 2
    if not (m and n and k) or scales > MAX_SCALES:
        return ""
    return host.row_for(op, x, m, n, k, prefill, counts=select.Counts(scales=scales) if scales > 1 else select.ONE).csrc


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _scales(global_scale: Tensor, rows: Sequence[int] | None) -> Tensor:
    """As a kernel takes them: one of one member is that of all rows."""
    return global_scale.reshape(()) if rows and len(rows) == 1 else global_scale.contiguous()


def _scaled(name: str, z: Tensor, squares: Tensor, eps: float, weight: tuple[Tensor, ...], bias: Tensor | None, then: Epilogue) -> Any:
    options = Options(then=then, half=(_rows(squares), eps))
    y = csrc.call(name, _rows(z), weight[:-1], weight[-1], bias, host.arch(z.device), options)
    return y.view(*z.shape[:-1], y.shape[1])
