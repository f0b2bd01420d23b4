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


# The arguments of select.describe but the last one: a key that is hashed at every call.
Described = tuple[str, torch.device, torch.dtype, int, int, str, tuple[str, ...], select.Counts]


@functools.lru_cache(maxsize=4096)
def _plan(described: Described, config: DispatchConfig) -> select.Plan:
    return select.plan(select.describe(*described, eager=True), config)


def row_for(
    op: str, x: Tensor, m: int, n: int, k: int, prefill: str = "auto", form: tuple[str, ...] = (), counts: select.Counts = select.ONE
) -> Span:  # fmt: skip
    """The span of ``op`` for ``m`` rows (pairs of token and expert) of x and a weight ``[n, k]``. A plan is made once per kind of call.

    ``form``: as of :class:`.kernel.Call`; of ``fp4.moe``, :func:`select.moe_form`.
    """
    return _plan((op, x.device, x.dtype, n, k, prefill, form, counts), dispatch_config()).pick(m)


def row_for_codes(op: str, codes: Tensor, dtype: torch.dtype, m: int, n: int, k: int) -> Span:
    """As :func:`row_for`, for activations in NVFP4: ``dtype`` is that of the result."""
    return _plan((op, codes.device, dtype, n, k, "auto", (), select.ONE), dispatch_config()).pick(m)


registry.plan_caches.append(_plan.cache_clear)


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """``y + bias``, in place."""
    return y if bias is None else y.add_(bias)


def launched_early(pdl: bool) -> dict[str, bool]:
    """The launch option of a Triton kernel that begins early (programmatic dependent launch), as its constant PDL says: none where the architecture cannot."""
    return {"launch_pdl": True} if pdl else {}
