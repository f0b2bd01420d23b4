"""What every call on CUDA needs: the row for a call, the architecture, operands as the kernels read them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..config import DispatchConfig, dispatch_config
from . import registry, select
from .build import aligned as aligned
from .kernel import Span

arch = functools.cache(select.arch_of)


@functools.cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=4096)
def _plan(
    op: str, device: torch.device, dtype: torch.dtype, n: int, k: int, prefill: str, experts: int, form: tuple[str, ...], scales: int, config: DispatchConfig
) -> select.Plan:
    return select.plan(select.describe(op, device, dtype, n, k, prefill, experts, form, scales=scales), config)


def row_for(
    op: str, x: Tensor, m: int, n: int, k: int, prefill: str = "auto", experts: int = 1, dtype: torch.dtype | None = None, form: tuple[str, ...] = (),
    scales: int = 1,
) -> Span:  # fmt: skip
    """The span of ``op`` for ``m`` rows (pairs of token and expert) of x and a weight ``[n, k]``. A plan is made once per kind of call.

    ``dtype``: of the activations, where x holds their codes. ``form``: of ``fp4.moe``, :func:`select.moe_form`. ``scales``: as of :class:`select.Call`.
    """
    return _plan(op, x.device, dtype or x.dtype, n, k, prefill, experts, form, scales, dispatch_config()).pick(m)


registry.plan_caches.append(_plan.cache_clear)


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """``y + bias``, in place."""
    return y if bias is None else y.add_(bias)


def launched_early(pdl: bool) -> dict[str, bool]:
    """The launch option of a Triton kernel that begins early (programmatic dependent launch), as its constant PDL says: none where the architecture cannot."""
    return {"launch_pdl": True} if pdl else {}
