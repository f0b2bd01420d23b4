"""The kernels of this process: those of the package, and those that somebody else registered."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from .. import _salt
from ..config import dispatch_observers
from ..errors import ConfigError
from .forms import Library
from .kernel import Kernel

# Each file has the KERNELS of one source: what they are, their tiles, their launch. Those of an op stand in the order of the M that they serve.
_FILES = (
    "on_cpu",
    *("linear.gemv", "linear.gemv_cuda", "linear.table", "linear.small", "linear.wide", "linear.mid", "linear.rounded", "linear.wide_fp8", "linear.temporary"),
    *("linear_glu.gemv", "linear.unfused", "linear_chain.cuda"),
    *("linear_fp8.gemv", "linear_fp8.products"),
    *("linear_w4a4.mma_sync", "linear_w4a4.block_scaled", "linear_w4a4.dequantized"),
    *("sparse_linear.gemv", "sparse_linear.table", "sparse_linear.small", "sparse_linear.wide", "sparse_linear.mid", "sparse_linear.wide_fp8"),
    "sparse_linear.temporary",
    *("moe.decode", "moe.decode_table", "moe.grouped_wide", "moe.grouped", "moe.many", "moe.by_expert"),
    *("decode_attention.split", "decode_attention.masked", "decode_attention.by_sdpa", "cached_attention.step"),
    *("cached_attention.cuda", "cached_attention.cuda_step", "cached_attention.quantized", "cached_attention.prefill", "cached_attention.composed"),
    *("paged_attention.cuda", "paged_attention.gathered"),
    *("router.cuda", "router.two_launches"),
)
FOREIGN = ("linear", "sparse_linear")  # ops that take kernels from outside
_added: list[Kernel] = []
plan_caches: list[Callable[[], None]] = []  # called after a kernel was added or taken back


@functools.cache
def _ours() -> tuple[Kernel, ...]:
    return tuple(kernel for file in _FILES for kernel in importlib.import_module(f".{file}", __package__).KERNELS)


def libraries() -> dict[str, Library]:
    """The libraries of ``csrc/`` behind the package's kernels, those for several global scales besides, by the names of their operators."""
    found = [kernel.library for kernel in _ours() if kernel.library]
    return {library.name: library for one in found for library in (one, one.for_scales(2))}


def kernels(op: str | None = None) -> tuple[Kernel, ...]:
    """All kernels, or those of ``op``. Kernels from outside of the package come first: where they ask for a call, they serve it."""
    return tuple(kernel for kernel in (*_added, *_ours()) if op in (None, kernel.op))


def named(op: str) -> dict[str, Kernel]:
    """The package's kernels of ``op`` by name."""
    return {kernel.name: kernel for kernel in _ours() if kernel.op == op}


def regimes() -> tuple[str, ...]:
    """The names that ``DispatchConfig.thresholds`` may have."""
    return tuple(dict.fromkeys(kernel.regime for kernel in kernels()))


def register(kernel: Kernel) -> Kernel:
    """Add a kernel from outside of the package. Calls that it does not refuse are served by it up to ``kernel.until(call)`` rows.

    Compiled graphs and plans made before keep what they have: register before the first call.

    Raises:
        ConfigError: a kernel of this name serves the op already, the op takes none from outside, or ``until`` or ``launch`` is missing.
    """
    if any((other.op, other.name) == (kernel.op, kernel.name) for other in kernels()):
        raise ConfigError("a kernel of this name serves the op already", value=f"{kernel.op}: {kernel.name}", limit="one", remedy="Give it another name.")
    if kernel.op not in FOREIGN:
        raise ConfigError("no kernel from outside serves this op", value=kernel.op, limit=list(FOREIGN), remedy="Register one for another op.")
    if kernel.until is None or kernel.launch is None:
        raise ConfigError(
            "a kernel from outside does not say up to which M it serves a call, or how",
            value=f"{kernel.name}: until={kernel.until}, launch={kernel.launch}",
            limit="Kernel(until=..., launch=...)",
            remedy="Write until=lambda call: 16, or lambda call: None for every M, and the function that computes the product.",
        )
    _added.append(kernel)
    _changed()
    return kernel


def unregister(kernel: Kernel) -> None:
    """Take back :func:`register`."""
    _added.remove(kernel)
    _changed()


def foreign(op: str) -> bool:
    """Has somebody registered a kernel for ``op``?"""
    return bool(_added) and any(kernel.op == op for kernel in _added)  # asked at every call on a CPU


def _changed() -> None:
    """Plans are made anew, and torch's compile caches are asked with another key."""
    for forget in plan_caches:
        forget()
    _salt.foreign_kernels[:] = sorted(f"{kernel.op}:{kernel.name}" for kernel in _added)
    for tell in dispatch_observers:
        tell()
