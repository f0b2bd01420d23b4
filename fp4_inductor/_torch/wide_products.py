"""Products of bfloat16 and float16 on a CPU without instructions for them, computed in float32.

Without AVX-512 oneDNN serves no 16-bit product, and torch's own loops take 5 to 25 times as long as float32 (AMD EPYC with AVX2, one thread,
GFLOP/s of a linear layer of 512 x 192 over 4,096 rows, bfloat16 and float32: forward 7 and 38, gradient of the input 2 and 50). The operands are
copied to float32, the result is rounded once: what a GPU computes, which accumulates in float32, too.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_HALVES = (torch.bfloat16, torch.float16)
_LEAST = 16  # rows and columns of a product: below, the copies of a weight take as long as the product
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1}  # -> position of its first factor
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # the forward pass is as fast in both


@functools.cache
def serves(dtype: torch.dtype) -> bool:
    """Has this CPU products of ``dtype``, as far as torch uses them? Known of x86 alone."""
    if dtype not in _HALVES or platform.machine() not in ("x86_64", "AMD64"):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else torch.ops.mkldnn._is_mkldnn_fp16_supported())


class _WideProducts(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        half = _half_of(op, args)
        if half is None:
            return op(*args, **(kwargs or {}))
        found = op(*(t.float() if isinstance(t, Tensor) and t.dtype == half else t for t in args), **(kwargs or {}))
        return tuple(t.to(half) for t in found) if isinstance(found, tuple) else found.to(half)


def _half_of(op: Any, args: tuple) -> torch.dtype | None:
    """The 16-bit dtype of a call that is computed in float32; None: it stays."""
    if op is _ATTENTION:  # nothing else makes this call but torch: its tensors are plain, and on the CPU
        return None if serves(args[0].dtype) else args[0].dtype
    if op not in _PRODUCTS:
        return None
    a, b = args[_PRODUCTS[op] :][:2]
    plain = a.device.type == "cpu" and type(a) in (Tensor, torch.nn.Parameter) and type(b) in (Tensor, torch.nn.Parameter)
    return a.dtype if plain and not serves(a.dtype) and min(*a.shape[-2:], b.shape[-1]) >= _LEAST else None


def wide_products(of: Iterable[Tensor]) -> contextlib.AbstractContextManager:
    """While active, products on the CPU are computed in float32 where :func:`serves` says no. Backward passes of this thread, too.

    Args:
        of: what takes part in them, as a model's Parameters. Nothing happens if none is on a CPU that does not serve its dtype.
    """
    active = any(isinstance(mode, _WideProducts) for mode in _get_current_dispatch_mode_stack())
    wanted = any(t.device.type == "cpu" and not serves(t.dtype) for t in of)
    return _WideProducts() if wanted and not active else contextlib.nullcontext()
