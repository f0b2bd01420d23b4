"""Which regime a symbolic M lies in: proven, else guarded where guards are checked, else left to the op at run time.

Pure: ``symbols`` answers what is known of M (:class:`fp4_inductor._torch.lowering.Symbols`, or a test's stand-in).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..config import DispatchConfig
from ..kernels.kernel import Span
from ..kernels.select import Plan, Refused
from ..ranges import Range, range_in_force

How = Literal["proven", "guard", "runtime"]


class SymbolFacts(Protocol):
    def covered(self, m: Any) -> bool: ...
    def interval(self, m: Any, given: Range | None) -> tuple[Any, Any] | None: ...
    def at_most(self, m: Any, bound: int) -> bool: ...
    def above(self, m: Any, bound: int) -> bool: ...
    def why_no_guard(self, m: Any) -> str | None: ...
    def guard_at_most(self, m: Any, bound: int) -> bool: ...
    def guarded(self, m: Any) -> bool: ...
    def hold(self, m: Any, low: int, high: int | None, what: str) -> None: ...


@dataclass(frozen=True)
class Decision:
    """The row for one call, or None for "the op decides at run time"; ``note`` says why nothing better was possible, or whose word the choice is."""

    row: Span | None
    how: How
    note: str = ""


def refusals(plan: Plan, decision: Decision) -> tuple[Refused, ...]:
    """Why rows of a fused operator do not serve a call that is computed in steps: ``plan``'s own reasons, or that M is known at run time only."""
    if decision.row is not None:
        return plan.refused
    late = f"decided at run time: {decision.note}"
    return (*plan.refused, *(Refused(row.implementation, late) for row in plan.rows if row.regime != "unfused"))


def known(plan: Plan, m: Any, symbols: SymbolFacts, otherwise: str) -> Decision:
    """The row of ``plan`` that serves every ``m`` there can be. For operators that choose at each call: nothing is guarded, or held.

    ``otherwise``: the note if M decides.
    """
    first, last = _open(plan, m, symbols, range_in_force())
    if first < last:
        return Decision(None, "runtime", otherwise)
    return Decision(plan.rows[first], "guard" if symbols.guarded(m) else "proven")


def decide(plan: Plan, m: Any, symbols: SymbolFacts, config: DispatchConfig) -> Decision:
    """Pick a row of ``plan`` for ``m``.

    What is promised of M (:func:`fp4_inductor.compile_range`) and value ranges (``mark_dynamic(min, max)``, ``torch._check``, products of batch
    and length) do the work first; a guard is added only between the rows that they leave open, at most one per boundary, and only where Dynamo
    checks it. The graph checks M itself at each call, once, in case a guard is dropped or a promise is broken.
    """
    given = range_in_force()
    first, last = _open(plan, m, symbols, given)
    by_range = given is not None and symbols.covered(m)
    if first == last:
        # A graph's second call finds M proven by the guard that its first call added.
        how: How = "guard" if symbols.guarded(m) and not by_range else "proven"
        return _held(plan, first, m, symbols, Decision(plan.rows[first], how, str(given) if by_range and plan.bounds else ""))
    within = symbols.interval(m, given) if by_range else None
    if within is not None and _narrow(*within):
        note = f"{given}: one kernel for the whole range, of {', '.join(row.kernel for row in plan.rows[first : last + 1])}"
        return _held(plan, last, m, symbols, Decision(plan.rows[last], "proven", note), within[0])
    if config.unproven == "runtime":
        return Decision(None, "runtime", 'DispatchConfig(unproven="runtime")')
    refusal = symbols.why_no_guard(m)
    if refusal is not None:
        unused = f"; {given} is for graphs with one dynamic size" if given is not None and not by_range else ""
        return Decision(None, "runtime", f"{refusal}; {given} spans several regimes" if by_range else refusal + unused)
    while first < last and not symbols.guard_at_most(m, plan.bounds[first]):
        first += 1
    return _held(plan, first, m, symbols, Decision(plan.rows[first], "guard"))


def likely(m: Any, symbols: Any, fallback: int) -> int:
    """A likely value of ``m`` that the range in force allows; no guard."""
    hint, within = symbols.hint(m, fallback), symbols.interval(m, range_in_force())
    return hint if within is None else int(min(max(hint, within[0]), within[1]))


def _open(plan: Plan, m: Any, symbols: SymbolFacts, given: Range | None) -> tuple[int, int]:
    """The first and the last row of ``plan`` that may serve ``m``, for all that is known."""
    within = symbols.interval(m, given)
    above = symbols.above if within is None else lambda m, bound: bool(within[0] > bound)
    at_most = symbols.at_most if within is None else lambda m, bound: bool(within[1] <= bound)
    first = sum(1 for _ in itertools.takewhile(lambda bound: above(m, bound), plan.bounds))
    last = next((i for i, bound in enumerate(plan.bounds) if at_most(m, bound)), len(plan.rows) - 1)
    return first, max(first, last)


def _narrow(least: Any, largest: Any) -> bool:
    """Is the largest M less than twice the least? There the kernel of the largest one loses less at the least than a choice at run time costs:
    an operator that chooses has no fused epilogue and does not begin while the kernel before it runs."""
    return bool(least > 0) and largest is not None and bool(largest < 2 * least)


def _held(plan: Plan, i: int, m: Any, symbols: SymbolFacts, decision: Decision, least: Any = None) -> Decision:
    """``decision``, for row ``i``, which the graph will say at each call that it needs, from ``least`` rows on if that is less than the row's own.

    On a CPU the operator that is called decides by itself.
    """
    ends = (0, *(bound + 1 for bound in plan.bounds)), (*plan.bounds, None)
    if plan.bounds and plan.call.arch:
        low = ends[0][i] if least is None else min(int(least), ends[0][i])
        symbols.hold(m, low, ends[1][i], f"{plan.rows[i].kernel} of fp4.{plan.call.op}, N = {plan.call.n}, K = {plan.call.k}")
    return decision
