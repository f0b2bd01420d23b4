"""Zeros that a compiled graph keeps from one call to the next: a constant of Inductor's.

Inductor never gives a constant's memory to another tensor, and never frees it while the graph is there. A constant is stored with the graph in compile
caches. So these zeros are stored as their length alone: they are zeros wherever they are loaded, each load has its own, and equal graphs are equal bytes
(vLLM stores a graph once that many layers share; a plain tensor is pickled with an address).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V

from .fx import without_modes
from .lowering import view


def zeros_on(device: str, count: int) -> torch.Tensor:
    """``[1, count]`` of them, int32, new. A subclass of Tensor would say how it is stored, but Inductor lowers no operator that is given one."""
    with without_modes():
        made = _allocated(device, count)
    made.__reduce_ex__ = functools.partial(_stored, device, count)  # type: ignore[method-assign]
    return made


def _stored(device: str, count: int, protocol: Any) -> tuple:
    return zeros_on, (device, count)


def _allocated(device: str, count: int) -> torch.Tensor:
    return torch.zeros(1, count, dtype=torch.int32, device=device)


def why_not() -> str:
    """Why the graph being lowered cannot keep them; empty: it can."""
    if V.graph.aot_mode:
        return "ahead-of-time compilation, whose runners share constants"
    if V.graph.cpp_wrapper:
        return "a C++ wrapper"
    return "inside a subgraph" if isinstance(V.graph, SubgraphLowering) else ""


def zeros(name: str, count: int, device: torch.device) -> Any:
    """IR of the ``count`` zeros that the graph being lowered keeps under ``name`` on ``device``: the same at each call."""
    found = V.graph.__dict__.setdefault("fp4_kept", {})
    if (name, device) not in found:
        found[name, device] = V.graph.add_tensor_constant(zeros_on(str(device), count), name)
    # A view: Inductor would give an operator that reads the constant itself the real tensor among fake ones.
    return view(found[name, device], [count])
