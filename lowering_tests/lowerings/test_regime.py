"""regime.decide with stand-ins for what a graph knows of M: proven, guarded or left to run time, and how many guards that took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import sympy
import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels.kernel import ANY, COMPILED, Kernel, On, Span
from fp4_inductor.kernels.select import Call, Plan
from fp4_inductor.lowerings.regime import Decision, decide


def plan_of(*bounds: int | None) -> Plan:
    on = On(80, 129, COMPILED, "invented for this test")
    rows = tuple(Span(Kernel("linear", f"k{i}", "mid", (on,), ANY), b, on) for i, b in enumerate(bounds))
    return Plan(Call("linear", 90, torch.bfloat16, 64, 64), rows, ())


PLAN = plan_of(4, 64, 256, None)


@dataclass
class Facts:
    """M lies in [low, high] for all a graph knows; the example has ``hint``. ``alone``: M is the graph's only dynamic size; ``trusted``: guards are checked."""

    low: float
    high: float
    hint: int = 0
    no_guard: str | None = None
    asked: list[int] = field(default_factory=list)
    alone: bool = True
    trusted: bool = True
    held: list[tuple[int, int | None, str]] = field(default_factory=list)

    def covered(self, m):
        return self.alone

    def interval(self, m, given):
        if given is not None and self.alone:
            return given.low, math.inf if given.high is None else given.high
        return None if self.trusted else (0, math.inf)

    def hold(self, m, low, high, what):
        self.held.append((low, high, what))

    def at_most(self, m, bound):
        return self.high <= bound

    def above(self, m, bound):
        return self.low > bound

    def why_no_guard(self, m):
        return self.no_guard

    def guard_at_most(self, m, bound):
        assert self.low <= bound < self.high, "a guard was asked for what is known"
        self.asked.append(bound)
        return self.hint <= bound

    def guarded(self, m):
        return bool(self.asked)


@pytest.mark.parametrize(
    ("low", "high", "kernel"),
    [(1, 1, "k0"), (2, 4, "k0"), (0, 4, "k0"), (5, 5, "k1"), (5, 64, "k1"), (65, 256, "k2"), (257, 257, "k3"), (257, math.inf, "k3"), (5000, 6000, "k3")],
)
def test_a_range_inside_one_regime_is_proven_and_asks_for_no_guard(low, high, kernel):
    facts = Facts(low, high)
    assert decide(PLAN, "m", facts, DispatchConfig()) == Decision(PLAN.rows[int(kernel[1])], "proven")
    assert facts.asked == []


@pytest.mark.parametrize(
    ("low", "high", "hint", "kernel", "asked"),
    [
        (2, math.inf, 3, "k0", [4]),
        (2, math.inf, 5, "k1", [4, 64]),
        (2, math.inf, 100, "k2", [4, 64, 256]),
        (2, math.inf, 4096, "k3", [4, 64, 256]),
        (5, math.inf, 20, "k1", [64]),
        (5, 256, 20, "k1", [64]),
        (5, 256, 100, "k2", [64]),  # the range closes the upper boundary: one guard
        (65, 1 << 20, 1 << 19, "k3", [256]),
        (2, 64, 64, "k1", [4]),
    ],
)
def test_guards_only_between_the_rows_that_the_range_leaves_open(low, high, hint, kernel, asked):
    facts = Facts(low, high, hint)
    found = decide(PLAN, "m", facts, DispatchConfig())
    assert found == Decision(PLAN.rows[int(kernel[1])], "guard")
    assert facts.asked == asked


def test_graphs_of_one_guard_mode_cover_every_m_without_overlap():
    """The guards that ``decide`` asks for cut the numbers into as many pieces as there are rows."""
    regions = {}
    for m in range(1, 600):
        facts = Facts(1, math.inf, m)
        row = decide(PLAN, "m", facts, DispatchConfig()).row
        regions.setdefault(tuple((bound, m <= bound) for bound in facts.asked), set()).add(row.kernel)
        assert row is PLAN.pick(m)
    assert len(regions) == len(PLAN.rows)
    assert all(len(kernels) == 1 for kernels in regions.values())


def test_no_guard_possible_leaves_the_op_to_decide():
    facts = Facts(2, math.inf, 8, no_guard="ahead-of-time compilation drops guards")
    assert decide(PLAN, "m", facts, DispatchConfig()) == Decision(None, "runtime", "ahead-of-time compilation drops guards")
    assert facts.asked == []


def test_what_is_proven_needs_no_guard_even_where_none_is_possible():
    facts = Facts(5, 64, no_guard="M is unbacked")
    assert decide(PLAN, "m", facts, DispatchConfig()).how == "proven"


def test_the_user_may_prefer_run_time():
    config = DispatchConfig(unproven="runtime")
    facts = Facts(2, math.inf, 8)
    found = decide(PLAN, "m", facts, config)
    assert (found.row, found.how) == (None, "runtime")
    assert "unproven" in found.note
    assert facts.asked == []
    assert decide(PLAN, "m", Facts(1, 1), config).how == "proven"


def test_the_second_call_of_a_graph_owes_its_regime_to_the_guard():
    facts = Facts(5, 64, asked=[64])
    assert decide(PLAN, "m", facts, DispatchConfig()) == Decision(PLAN.rows[1], "guard")
    assert facts.asked == [64]


def test_one_row_is_always_proven():
    only = plan_of(None)
    assert decide(only, "m", Facts(0, math.inf), DispatchConfig()) == Decision(only.rows[0], "proven")


def test_symbols_refuse_guards_that_would_be_dropped(monkeypatch):
    from torch._dynamo.hooks import Hooks
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from fp4_inductor._torch import guards
    from fp4_inductor._torch.lowering import Symbols

    class Graph:
        aot_mode = False
        sizevars = SimpleNamespace(shape_env=ShapeEnv())

    unbacked = ShapeEnv().create_unbacked_symint().node.expr
    backed = sympy.Symbol("s0", integer=True, positive=True)
    with V.set_graph_handler(Graph()):
        assert "Dynamo does not compile this graph" in Symbols().why_no_guard(backed)
        monkeypatch.setattr(guards, "_hooks_of", lambda shape_env: Hooks())
        assert Symbols().why_no_guard(backed) is None
        assert Symbols().why_no_guard(backed * 7) is None
        assert "unbacked" in Symbols().why_no_guard(backed * unbacked)
        monkeypatch.setattr(Graph, "aot_mode", True)
        assert "ahead-of-time" in Symbols().why_no_guard(backed)
