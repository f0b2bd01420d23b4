"""The kernels on a CPU, one for each op: it chooses by M itself (``linear/cpu.py``, ``moe/by_expert.py``, ``ops/linear_fp8.py``)."""

from __future__ import annotations

from .kernel import ANY, BY_LIBRARY, CPU_ROWS, IN_CI, Kernel, On

_UNKNOWN = (1, "not examined")


def _cpu(op: str, why: str, batch: tuple[int, str], k_multiple: int = 16) -> Kernel:
    return Kernel(op, "cpu", "cpu", (On(0, 0, IN_CI, why),), ANY, k_multiple=k_multiple, batch=batch)


KERNELS = (
    _cpu("linear", "C kernel: GEMV for M <= 8, else decode a cached block and multiply; dispatches itself", CPU_ROWS),
    _cpu("sparse_linear", "C kernel: GEMV on the kept weights for M <= 8, else as dense", CPU_ROWS),
    _cpu("linear_fp8", "float32 products of cached blocks: saves memory, not time", BY_LIBRARY, k_multiple=1),
    _cpu("linear_w4a4", "activations in float32 and the C kernel of fp4.linear: nothing is gained, it serves to judge quality", _UNKNOWN),
    _cpu("moe", "expert by expert, only those with tokens, through the C kernels of fp4.linear", _UNKNOWN),
    _cpu("sparse_moe", "expert by expert, only those with tokens, through the C kernels of fp4.sparse_linear", _UNKNOWN),
)
