"""Who checks, before a call, what a compiled graph assumes of its sizes: the guards of Dynamo, or nobody.

Guards are recorded in a ShapeEnv. They are checked only if Dynamo itself compiles the graph, with a filter that keeps them. Nobody checks
them after ``torch.compile(options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe})``, of a graph that
``torch._inductor.standalone_compile`` or ``torch._inductor.compile`` compiles, or in a later compilation with Dynamo's ShapeEnv (vLLM).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import sympy
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.hooks import Hooks
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import ShapeEnvSource, TensorProperty, TensorPropertySource
from torch._dynamo.types import GuardFilterEntry
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StrictMinMaxConstraint

# Why nobody checks what is known in a ShapeEnv; empty: Dynamo does. A backward, which is compiled later, goes by what its forward found.
_answers: weakref.WeakKeyDictionary[ShapeEnv, str] = weakref.WeakKeyDictionary()

NOT_DYNAMO = "Dynamo does not compile this graph: nothing checks its guards"


def why_unchecked(shape_env: ShapeEnv) -> str:
    """Empty if Dynamo checks before each call what ``shape_env`` knows of backed sizes, as far as it knows it now; else why nobody does."""
    hooks = _hooks_of(shape_env)
    if hooks is not None:
        _answers[shape_env] = _why_filtered(hooks.guard_filter_fn)
        if inductor_config.unsafe_skip_cache_dynamic_shape_guards:
            _answers[shape_env] = "torch._inductor.config.unsafe_skip_cache_dynamic_shape_guards"
    return _answers.get(shape_env, NOT_DYNAMO)


def why_no_more(shape_env: ShapeEnv) -> str:
    """Empty if a guard recorded now will be checked; else why not."""
    reason = why_unchecked(shape_env)
    if not reason and (shape_env.frozen or shape_env._suppress_guards_tls()):
        reason = "the guards of this graph are complete (it is a backward, or compiled after its forward)"
    if not reason and _hooks_of(shape_env) is None:
        reason = NOT_DYNAMO
    return reason


def are_checked() -> bool:
    """Does Dynamo check the guards of the graph that this thread compiles?"""
    context = TracingContext.try_get()
    shape_env = None if context is None else getattr(context.fake_mode, "shape_env", None)
    return shape_env is not None and not why_unchecked(shape_env)


def promised(shape_env: ShapeEnv) -> dict[sympy.Symbol, tuple[int, Any]]:
    """``{symbol: (low, high)}`` of the sizes for which the user gave a range with ``mark_dynamic(min=, max=)``. Dynamo refuses a guard that narrows it."""
    context = TracingContext.try_get()
    found: dict[sympy.Symbol, tuple[int, Any]] = {}
    for marked in context.tensor_to_context.values() if context is not None else ():
        for i, constraint in enumerate(getattr(marked, "constraint_sizes", None) or ()):
            if isinstance(constraint, StrictMinMaxConstraint) and not constraint.warn_only:
                source = TensorPropertySource(marked.tensor_source, TensorProperty.SIZE, i)
                found |= {s: (constraint.vr.lower, constraint.vr.upper) for s, sources in shape_env.var_to_sources.items() if source in sources}
    return found


def guard_filter_of(compiled: Any) -> Callable | None:
    """The ``guard_filter_fn`` that ``torch.compile`` was given for ``compiled``."""
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    hooks = getattr(callback, "hooks", None) or getattr(callback, "_hooks", None)
    return hooks.guard_filter_fn if isinstance(hooks, Hooks) else None


def _hooks_of(shape_env: ShapeEnv) -> Hooks | None:
    """The hooks of the compilation by Dynamo that this thread is inside and whose sizes are those of ``shape_env``."""
    frame, traces = sys._getframe(), False
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo."):
            here = frame.f_locals
            traced = here.get("self") if isinstance(here.get("self"), OutputGraph) else getattr(here.get("backend_input"), "fake_mode", None)
            if traced is not None and not traces:
                if traced.shape_env is not shape_env:
                    return None
                traces = True
            if traces and isinstance(here.get("hooks"), Hooks):
                return here["hooks"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _why_filtered(keep: Callable | None) -> str:
    """Does this ``guard_filter_fn`` drop the guards on sizes? They are one entry of the list that it gets."""
    if keep is None:
        return ""
    guard = ShapeEnvSource().make_guard(GuardBuilder.SHAPE_ENV)
    try:
        kept = list(keep([GuardFilterEntry("", False, None, guard.create_fn_name(), (), False, guard)])) == [True]
    except Exception:  # it expects other guards beside this one: what it will say of this one is not known
        kept = False
    return "" if kept else f"guard_filter_fn={getattr(keep, '__qualname__', keep)} drops the guards on sizes"
