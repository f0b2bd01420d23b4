"""Module-level tensors that Dynamo made graph inputs: their values, and a guard that they stay what they are.

A look-up table kept in a Python module (compressed-tensors' ``kE2M1ToFloat``) reaches the graph as an input, so that its
values are unknown to every graph pass. It can be made a constant of the graph if the graph is thrown away once the table
changes (a Dynamo guard on the object and its version counter) and if the values are part of the compile caches' key,
which they are when they are written into the graph before the key is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.source import AttrSource, GlobalSource
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.fx_passes.pre_grad import efficient_conv_bn_eval_pass
from torch._inductor.pattern_matcher import GraphPatternEntry, Match
from torch.fx import Graph, Node

from .fx import AtOutput

__all__ = ["attribute_floats", "before_autograd", "guard_equal", "guard_unchanged", "module_level_tensors", "run_before_cache_lookup"]


def before_autograd(apply: Callable[[Graph], None]) -> None:
    """Call ``apply(graph)`` for each graph that Inductor is given, before AOTAutograd.

    Appended to a pattern table that Inductor always applies; the ``pre_grad_custom_pass`` slot is left to others.
    """

    def check(match: Match) -> bool:
        apply(match.nodes[-1].graph)
        return False  # nothing to count and no node to replace

    entry = GraphPatternEntry(pattern=AtOutput(), extra_check=check, handler=lambda match: None)
    entry.register(efficient_conv_bn_eval_pass, target="output")


def run_before_cache_lookup() -> None:
    """Let graph passes before AOTAutograd run before the cache key is computed, unless the user has decided otherwise.

    torch 2.11 and 2.12 always do; later versions have an option, whose default leaves it open.
    """
    if getattr(config, "pre_grad_pass_timing", None) == "default":
        config.pre_grad_pass_timing = "early"


def module_level_tensors(graph: Graph) -> Iterator[tuple[Node, torch.Tensor, Any]]:
    """``(placeholder, real tensor, source)`` of each graph input that is an attribute of a Python module.

    Only where specialising on the values would be seen by the compile caches.
    """
    if getattr(config, "pre_grad_pass_timing", "early") != "early":
        return
    for node in graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")
        source = getattr(arg, "source", None)
        if _is_module_level(source):
            value = arg.example
            if type(value) is torch.Tensor and not value.is_inference():
                yield node, value, source


def attribute_floats(graph: Graph) -> Iterator[tuple[Node, float, Any]]:
    """``(placeholder, value, source)`` of each Python float attribute that ``dynamic=True`` made a graph input."""
    if getattr(config, "pre_grad_pass_timing", "early") != "early":
        return
    for node in graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")
        source, value = getattr(arg, "source", None), getattr(arg, "example", None) if arg is not None and not arg.is_tensor else None
        if type(source) is AttrSource and type(value) is torch.Tensor and value.dtype == torch.float64 and value.dim() == 0:
            yield node, value.item(), source


def guard_equal(source: Any, value: float) -> bool:
    """Recompile when the float at ``source`` is not ``value`` any more. False if no guard can be set."""
    context = TracingContext.try_get()
    if context is None:
        return False
    context.guards_context.dynamo_guards.add(source.make_guard(functools.partial(FLOAT_IS, value=value)))
    return True


def FLOAT_IS(builder: Any, guard: Any, value: float) -> None:  # noqa: N802  (Dynamo shows the name as the kind of guard)
    """Guard builder: the same float, of the same sign where it is zero."""

    def unchanged(now: Any) -> bool:
        return type(now) is float and repr(now) == repr(value)

    builder.get_guard_manager(guard).add_lambda_guard(unchanged, [f"{guard.name}: {value!r}"], guard.user_stack)


def _is_module_level(source: Any) -> bool:
    while type(source) is AttrSource:
        source = source.base
    return type(source) is GlobalSource


def guard_unchanged(source: Any, tensor: torch.Tensor) -> bool:
    """Recompile when ``source`` no longer holds these values. False if no guard can be set."""
    context = TracingContext.try_get()
    if context is None:
        return False
    guard = source.make_guard(functools.partial(TABLE_HOLDS, values=tensor.tolist()))
    context.guards_context.dynamo_guards.add(guard)
    return True


def TABLE_HOLDS(builder: Any, guard: Any, values: list[float]) -> None:  # noqa: N802  (Dynamo shows the name as the kind of guard)
    """Guard builder: the values are compared once, when the guard is built; afterwards object and version counter are."""
    table = builder.get(guard)
    version = table._version if table.tolist() == values else None

    def unchanged(now: Any) -> bool:
        return now is table and table._version == version

    builder.get_guard_manager(guard).add_lambda_guard(unchanged, [f"{guard.name}: look-up table was not modified"], guard.user_stack)
