"""What every launcher on CUDA needs: the row for a call, the architecture, operands as the kernels read them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ..config import DispatchConfig, dispatch_config
from . import csrc, registry, select
from .build import aligned as aligned
from .kernel import Span, for_scales
from .linear.configs import Epilogue

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


def by_cuda(name: str) -> Callable[..., Tensor]:
    """The launcher of a kernel of ``csrc/``: ``(x [M, K], *parts of the weight, global_scale, bias)`` to ``[M, N]``; it adds the bias itself.

    Its ``tile`` is one of the op's ``configs``; None: the kernel's choice. ``bounds``: the rows at which the second and the third global scale begin.
    """

    def launch(x: Tensor, *tensors: Any, tile: Any = None, bounds: tuple[int, ...] = ()) -> Tensor:
        *weight, global_scale, bias = tensors
        own, then = for_scales(name, 1 + len(bounds)), Epilogue(starts=bounds)
        return csrc.call(own, x, weight, global_scale, bias, arch(x.device), astuple(tile) if tile else (), then)

    return launch
