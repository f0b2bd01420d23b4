"""What the lowerings decided, for explain() and decisions(): one entry per quantized call, appended while a graph is being lowered."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._journal import LOWERED
from .._torch import lowering as inductor
from ..kernels.select import Plan, Refused
from .regime import Decision


@dataclass
class Entry:
    """One quantized call in one graph."""

    op: str
    node: str
    module: str
    m: str
    n: int
    k: int
    dtype: str
    decision: Decision
    refused: tuple[Refused, ...]
    arch: int
    experts: int = 1
    modules: list[str] = field(default_factory=list)  # module, and its like in every layer that this graph stands for
    buffer: str | None = None
    epilogue: list[str] = field(default_factory=list)
    note: str = ""


listen = LOWERED.listen


def record(plan: Plan, decision: Decision, m: Any, *, refused: Sequence[Refused] = (), module: str = "", note: str = "", op: str = "") -> Entry:
    """The node being lowered, M rows of the call that ``plan`` is for.

    Args:
        refused: what else was not taken.
        module: path of the layer, if not that of the node.
        note: what else a reader of explain() should know.
        op: that of the node, if it is another than the one of the kernels.
    """
    call = plan.call
    node, path = inductor.current_names()
    op = op or ("moe" if call.op == "sparse_moe" else call.op)
    dtype = str(call.dtype).removeprefix("torch.")
    reasons = _shared((*plan.refused, *refused))
    modules = inductor.in_every_layer(module or path)
    return LOWERED.record(Entry(f"fp4.{op}", node, modules[0], str(m), call.n, call.k, dtype, decision, reasons, call.arch, call.experts, modules, note=note))


@functools.lru_cache(maxsize=256)
def _shared(reasons: tuple[Refused, ...]) -> tuple[Refused, ...]:
    """One object for equal reasons: entries are kept, and the layers of a model have the same."""
    return reasons
