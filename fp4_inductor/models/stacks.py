"""Stacks of matrices whose module stays, and whose Parameter becomes an NVFP4Tensor. There are two kinds.

The module takes one matrix at a time: its own forward indexes the tensor and calls ``F.linear`` or ``matmul`` with what it gets, and both
take an NVFP4 matrix. Which modules do so is data (:attr:`.family.Family.stacks` with ``quantized``).

The module has transformers' experts interface, and ``fp4.moe`` does not know what it computes between the two products or behind
them. Then its own functions compute that (:mod:`fp4_inductor.integrations.experts`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..formats import nvfp4
from ..tensors import NVFP4Tensor
from . import families
from .coverage import LayerReport
from .experts import interface_weights
from .rounding_error import RoundingError

fp4 = torch.ops.fp4
_UNWEIGHTED = "mse"


@dataclass
class StackTarget:
    """One Parameter ``[E, N, K]`` (``[E, K, N]`` if ``transposed``) to be quantized.

    Args:
        names: every path its module has in the model.
        note: what its module does with it, for the report.
    """

    names: tuple[str, ...]
    module: nn.Module
    parameter: str
    transposed: bool
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.names[0]}.{self.parameter}" if self.names[0] else self.parameter

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter(self.parameter)

    @property
    def matrices(self) -> Tensor:
        """``[E, N, K]``, a view."""
        w = self.weight.detach()
        return w.mT if self.transposed else w


def stack_of(names: tuple[str, ...], module: nn.Module, name: str, p: Tensor) -> StackTarget | None:
    """``module.name`` as a stack to be quantized, or None. K has to be a multiple of 16: the module would not pad its inputs."""
    for family in families():
        for stack in family.stacks:
            if stack.quantized and re.fullmatch(stack.owner, type(module).__name__) and re.fullmatch(stack.parameter, name):
                return _target(names, module, name, p, stack.quantized == "[E, K, N]", "multiplies with one matrix at a time")
    return None


def experts_stack_of(names: tuple[str, ...], module: nn.Module, name: str) -> StackTarget | None:
    """``module.name`` as a weight of experts whose own functions go on computing, or None: both weights of a module, or none."""
    weights = interface_weights(module) or ()
    transposed = bool(getattr(module, "is_transposed", False))
    found = {n: _target(names, module, n, module.get_parameter(n), transposed, "computes what fp4.moe does not") for n in weights}
    return found.get(name) if all(found.values()) else None


def _target(names: tuple[str, ...], module: nn.Module, name: str, p: Tensor, transposed: bool, note: str) -> StackTarget | None:
    return None if p.shape[1 if transposed else 2] % nvfp4.GROUP else StackTarget(names, module, name, transposed, note)


def convert_stack(target: StackTarget, scale_search: str, device: torch.device | None) -> LayerReport:
    """Put an NVFP4Tensor in place of the Parameter; the dense weight is released."""
    dense = target.matrices
    dense = (dense if device is None else dense.to(device)).contiguous()
    weighted = scale_search in ("activation", "gptq")
    packed = NVFP4Tensor.from_dense(dense, _UNWEIGHTED if weighted else scale_search)
    sums = RoundingError()
    for e in range(len(dense)):
        parts = tuple(t[e] for t in packed.parts())
        if not sums.add_packed(dense[e], *parts):
            sums.add(dense[e].float(), fp4.dequantize(*parts, torch.float32), True)
    old = target.weight
    row = LayerReport(
        target.name,
        tuple(dense.shape),  # type: ignore[arg-type]
        dense.numel(),
        dense.numel() * dense.element_size(),
        sum(t.numel() * t.element_size() for t in packed.parts()),
        sums.relative(),
        (f"{type(target.module).__name__} stays and {target.note}" + (": unweighted scales" if weighted else ""),),
    )
    setattr(target.module, target.parameter, nn.Parameter(packed.mT if target.transposed else packed, requires_grad=False))
    del old
    return row if math.isfinite(row.relative_error or 0.0) else replace(row, relative_error=None)
