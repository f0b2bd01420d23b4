"""Inductor's post-grad pattern tables, reached additively: entries are appended, nothing of anyone else's is replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._inductor.fx_passes import post_grad
from torch._inductor.pattern_matcher import Arg, CallFunction, GraphPatternEntry, Match, PatternExpr, get_mutation_region_id, register_graph_pattern
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = ["anchor", "constant_of", "in_one_mutation_region", "module_path", "whole_graph", "without_modes"]

Rewrite = Callable[[], None]


class AtOutput(PatternExpr):
    """Matches the output node, which every graph has once."""

    op = "output"

    def _match(self, node: Node, ctx: Any) -> Match:  # type: ignore[override]
        match = Match(ctx, self)
        match.nodes.append(node)
        return match


def anchor(target: Any, arity: int, plan: Callable[[Node], Rewrite | None]) -> None:
    """For each post-grad node ``target(*arity positional arguments)`` ask ``plan(node)`` for a rewrite, and run it.

    The pattern is the anchor alone: ``plan`` reads the graph above it, so that operations that do not change the meaning
    (views, copies, conversions) need no pattern of their own.
    """

    def check(match: Match) -> bool:
        match.fp4_rewrite = plan(match.output_node())  # type: ignore[attr-defined]
        return match.fp4_rewrite is not None  # type: ignore[attr-defined]

    def run(match: Match, *args: Any) -> None:
        match.fp4_rewrite()  # type: ignore[attr-defined]

    pattern = CallFunction(target, *(Arg() for _ in range(arity)))
    register_graph_pattern(pattern, extra_check=check, pass_dict=post_grad.pass_patterns[0])(run)


def whole_graph(stage: int, apply: Callable[[Graph], None]) -> None:
    """Call ``apply(graph)`` for each graph in post-grad pattern table ``stage`` (0 to 2), before the other entries of that table.

    An entry is visited where its node stands, the last node first: this one hangs on the output.
    """

    def check(match: Match) -> bool:
        apply(match.nodes[-1].graph)
        return False  # nothing to count and no node to replace

    entry = GraphPatternEntry(pattern=AtOutput(), extra_check=check, handler=lambda match: None)
    entry.register(post_grad.pass_patterns[stage], target="output")


def in_one_mutation_region(nodes: Iterable[Node]) -> bool:
    """False if a mutating node lies between them: what one reads is then not what another one would read.

    Placeholders and attributes stand before everything and are not counted.
    """
    return len({get_mutation_region_id(n.graph, n) for n in nodes if n.op not in ("placeholder", "get_attr")}) <= 1


def module_path(node: Node) -> str:
    """Path of the innermost module that ``node`` comes from, where torch knows it.

    It begins at the module that is compiled. A decorator around the ``forward`` of that one has it as the first of its ``args``.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return re.sub(r"^L\['(args'\]\[0|\w+')\]\.?|\.forward\.__self__(?=\.|$)", "", list(stack.values())[-1][0]) if stack else ""


def constant_of(node: Node) -> torch.Tensor | None:
    """The real tensor behind a ``get_attr`` node, or None when there is none (a fake, an input, a submodule)."""
    value: Any = node.graph.owning_module
    if node.op != "get_attr" or value is None:
        return None
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if type(value) in (torch.Tensor, torch.nn.Parameter) else None
