"""Which regime a symbolic M lies in: proven, else guarded, else left to the op at run time.

Pure: ``symbols`` answers what is known of M (:class:`fp4_inductor._torch.lowering.Symbols`, or a test's stand-in).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..config import DispatchConfig
from ..kernels.select import Plan, Refused
from ..kernels.table import Row

How = Literal["proven", "guard", "runtime"]


class SymbolFacts(Protocol):
    def at_most(self, m: Any, bound: int) -> bool: ...
    def above(self, m: Any, bound: int) -> bool: ...
    def why_no_guard(self, m: Any) -> str | None: ...
    def guard_at_most(self, m: Any, bound: int) -> bool: ...
    def guarded(self, m: Any) -> bool: ...


@dataclass(frozen=True)
class Decision:
    """The row for one call, or None for "the op decides at run time"; ``note`` says why nothing better was possible."""

    row: Row | None
    how: How
    note: str = ""


def refusals(plan: Plan, decision: Decision) -> tuple[Refused, ...]:
    """Why rows of a fused operator do not serve a call that is computed in steps: ``plan``'s own reasons, or that M is known at run time only."""
    if decision.row is not None:
        return plan.refused
    late = f"decided at run time: {decision.note}"
    return (*plan.refused, *(Refused(row, late) for row in plan.rows if row.regime != "unfused"))


def decide(plan: Plan, m: Any, symbols: SymbolFacts, config: DispatchConfig) -> Decision:
    """Pick a row of ``plan`` for ``m``.

    Value ranges do the work first (``mark_dynamic(min, max)``, ``torch._check``, products of batch and length); a guard
    is added only between the rows that the ranges leave open, at most one per boundary.
    """
    first = 0
    for bound in plan.bounds:
        if not symbols.above(m, bound):
            break
        first += 1
    last = len(plan.rows) - 1
    for i, bound in enumerate(plan.bounds):
        if symbols.at_most(m, bound):
            last = i
            break
    if first == last:
        # A graph's second call finds M proven by the guard that its first call added.
        return Decision(plan.rows[first], "guard" if symbols.guarded(m) else "proven")
    if config.unproven == "runtime":
        return Decision(None, "runtime", 'DispatchConfig(unproven="runtime")')
    refusal = symbols.why_no_guard(m)
    if refusal is not None:
        return Decision(None, "runtime", refusal)
    while first < last and not symbols.guard_at_most(m, plan.bounds[first]):
        first += 1
    return Decision(plan.rows[first], "guard")
