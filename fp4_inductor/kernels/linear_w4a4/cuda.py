"""fp4.linear_w4a4 on CUDA: activations and weight in NVFP4, by the kernel that ``select.plan`` gives."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import linear_w4a4 as contract
from ...ops.linear import without_products
from .. import csrc, host, run
from ..forms import Library, Options, Problem


def linear_w4a4(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[M, N]`` in ``dtype``."""
    contract.check(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype)
    (m, k), n = (x_qdata.shape[0], x_qdata.shape[1] * 2), qdata.shape[0]
    if m == 0 or n == 0 or k == 0:
        return without_products(row_scale.new_empty((m, k), dtype=dtype), n, bias)
    form = host.row_for_codes("linear_w4a4", x_qdata, dtype, m, n, k).implementation.form
    problem = Problem(m, n, k, host.arch(x_qdata.device), dtype)
    with torch.cuda.device(x_qdata.device):
        codes = (host.aligned(x_qdata), host.aligned(x_scale), row_scale.contiguous())
        weight, bias = (host.aligned(qdata), host.aligned(scale), global_scale), None if bias is None else host.aligned(bias)
        return by_form(form, codes, weight, problem, bias)


def by_form(form: object, codes: tuple[Tensor, ...], weight: tuple[Tensor, ...], p: Problem, bias: Tensor | None) -> Tensor:
    """``[M, N]`` in ``p.dtype``; tensors are contiguous and aligned."""
    if isinstance(form, Library):  # codes carry no dtype: ``half`` says it
        return csrc.call(form.name, codes, weight[:-1], weight[-1], bias, p.arch, Options((int(p.dtype == torch.float16),)))
    return run.multiplied(form, codes, weight, p, bias)
