"""The CUDA kernels that a model can reach are compiled while it is still being traced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..kernels import select
from ..kernels.select import Call
from ..modules import FP4Experts, FP4Linear, SiblingLinear, Sparse24ExpertWeight, Sparse24Linear
from ..modules.fp8 import FP8Linear


def compile_ahead(model: nn.Module) -> None:
    """Begin to compile the CUDA kernels for the quantized layers of ``model`` that are on a GPU; nothing if they are compiled."""
    select.compile_ahead({call for module in model.modules() for call in calls_of(module)})


def calls_of(module: nn.Module, arch: int | None = None) -> Iterator[Call]:
    """The calls that a graph may make by a quantized module on a GPU, alone or merged with what is around it.

    ``arch``: of the GPU; None: of that which the module is on, if it is on one.
    """
    if arch is None:
        device = next((buffer.device for buffer in module.buffers(recurse=isinstance(module, FP4Experts))), torch.device("cpu"))
        if device.type != "cuda":
            return
        arch = select.arch_of(device)
    if isinstance(module, FP4Experts):
        yield _experts(module, arch)
    elif isinstance(module, FP4Linear):
        n, k = module.storage().logical(module.parts()[0].shape)
        ops: tuple[str, ...] = (
            ("linear_fp8",) if isinstance(module, FP8Linear) else ("sparse_linear",) if isinstance(module, Sparse24Linear) else select.BECOMES["linear"]
        )
        yield from (_call(op, arch, module.dtype, n, k, module.prefill) for op in ops)
        if isinstance(module, SiblingLinear):
            ops = ("linear", "rms_scaled_linear")
            if len(module.packed.starts) == 2:
                ops = (*ops, *select.BECOMES["linear_glu"])
            yield from (_call(op, arch, module.dtype, module.packed.qdata.shape[0], k, module.prefill) for op in ops)


def _experts(module: FP4Experts, arch: int) -> Call:
    first, down = module.first, module.down_proj
    experts, rows, k = first.stored
    metas = [weight.parts()[1] if isinstance(weight, Sparse24ExpertWeight) else None for weight in (first, down)]
    op, inner = select.moe_op(*metas), down.stored[2]
    biases = (weight.bias.dtype for weight in (first, down) if weight.bias is not None)
    form = select.moe_form(module.activation.name, rows != inner, inner, experts, False, biases, op)
    return _call(op, arch, first.dtype, down.stored[1], k, module.prefill, experts, form)


def _call(op: str, arch: int, dtype: torch.dtype, n: int, k: int, prefill: str = "auto", experts: int = 1, form: tuple[str, ...] = ()) -> Call:
    return Call(op, arch, dtype, n, k, prefill, "", experts, select.triton_version(), form)
