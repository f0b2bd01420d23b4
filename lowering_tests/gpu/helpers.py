"""Random NVFP4 weights on the GPU, float64 references, and the bound that a call's kernel must keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_inductor import dispatch
from fp4_inductor.config import dispatch_config
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import host, registry, select
from fp4_inductor.kernels.forms import Library
from fp4_inductor.kernels.select import Plan, plan
from fp4_inductor.ops import linear

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Activations and weights both rounded to E4M3: 0.034 measured on Gaussian data.
FP8_BOUND = 0.04


def weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes are drawn directly: every code occurs, scales span 2**-2 to 2**2; results are of the order of the activations."""
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    s = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, device=DEVICE).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.full((), 0.3 / k**0.5, device=DEVICE)


def sparse_weight(n: int, k: int, pattern: int | None = None) -> sparse24.Sparse24Parts:
    """Every code; scales as in :func:`weight`; one pattern everywhere, or all mixed."""
    _, scale, g = weight(n, k)
    index = torch.randint(0, 6, (n, k // 4), device=DEVICE) if pattern is None else torch.full((n, k // 4), pattern, device=DEVICE)
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=DEVICE)[index]
    return sparse24.Sparse24Parts(torch.randint(0, 256, (n, k // 4), dtype=torch.uint8, device=DEVICE), sparse24.pack_meta(nibble), scale, g)


def exact(x: Tensor, q: Tensor, s: Tensor, g: Tensor, bias: Tensor | None = None) -> Tensor:
    """float64 on the dequantised weight."""
    y = x.double() @ nvfp4.dequantize(q, s, g, torch.float32).double().mT
    return y if bias is None else y + bias.double()


def error(y: Tensor, r: Tensor) -> float:
    """Relative Frobenius error; infinite if anything is not finite."""
    if not bool(y.isfinite().all()):
        return float("inf")
    return ((y.double() - r).norm() / r.norm().clamp_min(1e-300)).item() if y.numel() else 0.0


def plan_of(x: Tensor, q: Tensor, prefill: str = "auto") -> Plan:
    return plan(select.describe("linear", x.device, x.dtype, q.shape[0], q.shape[1] * 2, prefill), dispatch_config())


def bound_of(x: Tensor, q: Tensor, prefill: str = "auto", fused: bool = False) -> float:
    """The contract's tolerance, or that of the FP8 path where it serves the call."""
    m = x.shape[:-1].numel()
    if m and plan_of(x, q, prefill).pick(m).regime in ("large_fp8", "wide_fp8"):
        return FP8_BOUND
    few = 2 if m * q.shape[0] < 32 else 1  # a handful of roundings do not average
    accumulated = 6e-8 * x.shape[-1] ** 0.5  # float32 sums over K
    # a bias added after the rounding, or an epilogue, rounds once more
    return linear.CONTRACT.tolerance[x.dtype] * few * (2 if fused else 1) + accumulated


def one_m_per_regime(x_dtype: torch.dtype, q: Tensor, prefill: str = "auto") -> list[int]:
    """The first and the last M of every regime."""
    found = plan_of(torch.empty(1, q.shape[1] * 2, dtype=x_dtype, device=DEVICE), q, prefill)
    return sorted({m for bound in (0, *found.bounds) for m in (bound, bound + 1) if m})


@contextlib.contextmanager
def serving(which: Callable[[Library], Any], op: str, **options: Any) -> Iterator[None]:
    """The kernels of ``which`` libraries serve, those that are off by default, too; skips where there are none, or where those of ``op`` are not compiled."""
    kernels = [kernel for kernel in registry.kernels() if kernel.library and which(kernel.library)]
    here = [(kernel.name, on) for kernel in kernels if (on := kernel.at(host.arch(torch.device(DEVICE)))) is not None]
    if not here:
        pytest.skip(f"no such kernel of {op} here")
    with dispatch(candidates=tuple(name for name, on in here if on.off), **options):
        call = select.describe(op, torch.device(DEVICE), BF16, 4096, 4096)
        if call.csrc:
            pytest.skip(call.csrc)
        yield
