"""Products of bfloat16 and float16 on a CPU without instructions for them, computed in float32.

Without AVX-512 oneDNN serves no 16-bit product, and torch's own loops take 5 to 25 times as long as float32 (AMD EPYC with AVX2, one thread,
GFLOP/s of a linear layer of 512 x 192 over 4,096 rows, bfloat16 and float32: forward 7 and 38, gradient of the input 2 and 50). The operands are
copied to float32, the result is rounded once: what a GPU computes, which accumulates in float32, too.
"""

from __future__ import annotations

import contextlib
import functools
import platform
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
        if not _is_wide(op, args):
            return op(*args, **(kwargs or {}))
        half = next(t.dtype for t in args if isinstance(t, Tensor) and t.dtype in _HALVES)
        found = op(*(t.float() if isinstance(t, Tensor) and t.dtype in _HALVES else t for t in args), **(kwargs or {}))
        return tuple(t.to(half) for t in found) if isinstance(found, tuple) else found.to(half)


def _is_wide(op: Any, args: tuple) -> bool:
    if op is _ATTENTION:  # nothing else makes this call but torch: its tensors are plain, and on the CPU
        return args[0].dtype in _HALVES and not serves(args[0].dtype)
    if op not in _PRODUCTS:
        return False
    a, b = args[_PRODUCTS[op] :][:2]
    plain = a.device.type == "cpu" and a.dtype in _HALVES and type(a) in (Tensor, torch.nn.Parameter) and type(b) in (Tensor, torch.nn.Parameter)
    return plain and not serves(a.dtype) and min(*a.shape[-2:], b.shape[-1]) >= _LEAST


def wide_products() -> contextlib.AbstractContextManager:
    """While active, products on the CPU are computed in float32 where :func:`serves` says no. Backward passes of this thread, too."""
    active = any(isinstance(mode, _WideProducts) for mode in _get_current_dispatch_mode_stack())
    return contextlib.nullcontext() if active or all(map(serves, _HALVES)) else _WideProducts()
