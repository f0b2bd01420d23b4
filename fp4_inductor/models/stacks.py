"""Stacks of matrices whose module takes one matrix at a time and multiplies with it: the module stays, its Parameter becomes an NVFP4Tensor.

The module's own forward indexes the tensor and calls ``F.linear`` or ``matmul`` with what it gets, and both take an NVFP4 matrix.
Which modules do so is data (:attr:`.family.Family.stacks` with ``quantized``); each is held to its dequantized twin by a test.
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
from .rounding_error import RoundingError

fp4 = torch.ops.fp4
_UNWEIGHTED = "mse"


@dataclass
class StackTarget:
    """One Parameter ``[E, N, K]`` (``[E, K, N]`` if ``transposed``) to be quantized. ``names``: every path its module has in the model."""

    names: tuple[str, ...]
    module: nn.Module
    parameter: str
    transposed: bool

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
                transposed = stack.quantized == "[E, K, N]"
                k = p.shape[1 if transposed else 2]
                return None if k % nvfp4.GROUP else StackTarget(names, module, name, transposed)
    return None


def convert_stack(target: StackTarget, scale_search: str, device: torch.device | None) -> LayerReport:
    """Put an NVFP4Tensor in place of the Parameter; the dense weight is released."""
    dense = target.matrices
    dense = (dense if device is None else dense.to(device)).contiguous()
    weighted = scale_search == "activation"
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
        (f"{type(target.module).__name__} stays and multiplies with one matrix at a time" + (": unweighted scales" if weighted else ""),),
    )
    setattr(target.module, target.parameter, nn.Parameter(packed.mT if target.transposed else packed, requires_grad=False))
    del old
    return row if math.isfinite(row.relative_error or 0.0) else replace(row, relative_error=None)
