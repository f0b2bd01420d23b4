"""Host side of fp4.linear_w4a4 on CUDA. No synchronisation, current stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops import linear_w4a4 as contract
from ...ops.linear import without_products
from .. import csrc, host
from . import configs
from .triton_block_scaled import linear_w4a4 as block_scaled


def linear_w4a4(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[M, N]`` in ``dtype`` by the row that ``select.plan`` gives."""
    contract.check(x_qdata, x_scale, row_scale, qdata, scale, global_scale, bias, dtype)
    (m, k), n = (x_qdata.shape[0], x_qdata.shape[1] * 2), qdata.shape[0]
    if m == 0 or n == 0 or k == 0:
        return without_products(row_scale.new_empty((m, k), dtype=dtype), n, bias)
    row = host.row_for("linear_w4a4", x_qdata, m, n, k, dtype=dtype)
    with torch.cuda.device(x_qdata.device):
        x = (host.aligned(x_qdata), host.aligned(x_scale), row_scale.contiguous())
        return LAUNCHERS[row.kernel](*x, host.aligned(qdata), host.aligned(scale), global_scale, None if bias is None else host.aligned(bias), dtype)


def triton(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tile: configs.MidConfig | None = None,
) -> Tensor:  # fmt: skip
    """See :mod:`.triton_block_scaled`."""
    (m, half_k), n = x_qdata.shape, qdata.shape[0]
    c = tile or configs.choices(m, n, host.arch(x_qdata.device))[0]
    y = torch.empty(m, n, dtype=dtype, device=x_qdata.device)
    block_scaled[(-(-n // c.block_n) * -(-m // c.block_m),)](
        x_qdata, x_scale.view(torch.uint8), row_scale, qdata, scale.view(torch.uint8), global_scale, y, m, n, half_k * 2,
        **configs.constants(c, half_k * 2), num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    return host.plus(y, bias)


def cuda(
    x_qdata: Tensor, x_scale: Tensor, row_scale: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``csrc/gemm/linear_w4a4.cu``. The bias is added in the kernel."""
    x = (x_qdata, x_scale, row_scale)
    return csrc.call("linear_w4a4", x, (qdata, scale), global_scale, bias, host.arch(x_qdata.device), (int(dtype == torch.float16),))


LAUNCHERS: dict[str, Callable[..., Tensor]] = {"triton_w4a4": triton, "cuda_w4a4": cuda, "dequantize both + mm": contract.dequantized}
