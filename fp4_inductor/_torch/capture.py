"""Compile once more, graph caches off, and look at what came out. Used by explain()."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo import OptimizedModule
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from .guards import guard_filter_of

_VIEWS = {"view", "reshape", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "convert_element_type", "_to_copy", "unknown"}


def original(model: Any) -> tuple[Any, bool]:
    """``(the module or function that was given to torch.compile, True)``, or ``(model, False)``."""
    if isinstance(model, OptimizedModule):
        return model._orig_mod, True
    inner = getattr(model, "_torchdynamo_orig_callable", None)
    return (inner, True) if inner is not None else (model, False)


def _settings(model: Any) -> tuple[bool | None, dict[str, Any]]:
    """``(dynamic, inductor options)`` that ``torch.compile`` was called with."""
    context = getattr(model, "dynamo_ctx", None)
    options = dict(getattr(context, "compiler_config", None) or {})
    options.pop("triton.cudagraphs", None)  # capturing would only delay the answer
    return getattr(context, "_dynamic", None), options


def compile_again(model: Any, args: tuple, kwargs: dict, fused: Callable[[dict[str, list[str]]], None]) -> None:
    """Compile and run the original of ``model`` on the example inputs; ``fused`` gets ``{buffer: fused operations}`` of each graph."""
    dynamic, options = _settings(model)
    codegen, codegen_subgraph = GraphLowering.codegen, GraphLowering.codegen_subgraph
    in_regions: dict[str, list[str]] = {}

    def watched(graph, *a, **k):
        result = codegen(graph, *a, **k)
        fused({**in_regions, **_fusions(graph)})
        in_regions.clear()
        return result

    def watched_region(graph, *a, **k):
        codegen_subgraph(graph, *a, **k)
        in_regions.update(_fusions(graph))

    def backend(gm, example_inputs):
        return inductor.compile_fx(gm, example_inputs, config_patches=options)

    with (
        mock.patch.object(GraphLowering, "codegen", watched),
        mock.patch.object(GraphLowering, "codegen_subgraph", watched_region),
        inductor_config.patch(force_disable_caches=True),  # a graph out of a cache would not be lowered
        # but kernels that the model's own compilation built are the same: no empty folder for them, which that setting brings along
        mock.patch.object(inductor, "with_fresh_cache_if_config", contextlib.nullcontext),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*force_disable_caches.*")
        keep = guard_filter_of(model)
        filtered: dict[str, Any] = {} if keep is None else {"options": {"guard_filter_fn": keep}}
        torch.compile(original(model)[0], backend=backend, dynamic=dynamic, **filtered)(*args, **kwargs)


def _fusions(graph) -> dict[str, list[str]]:
    """For each template buffer: the operations fused behind it, in order."""
    out: dict[str, list[str]] = {}
    for fused in graph.scheduler.nodes:
        members = fused.get_nodes()
        template = next((m for m in members if m.is_template()), None)
        if template is None or len(members) < 2:
            continue
        operations: list[str] = []
        for member in members:
            if member is not template:
                operations += [name for name in _operations(member.node, template.node) if name not in operations]
        out[template.node.get_name()] = operations
    return out


def _operations(buffer, template) -> list[str]:
    # What computed the template's inputs is among the origins of everything behind it.
    nodes = sorted(set(buffer.get_origins()) - set(template.get_origins()), key=lambda n: n.name)
    names = [getattr(n.target, "_opname", None) or str(n.target) for n in nodes if n.op == "call_function"]
    shared = [name for n in buffer.get_origins() & template.get_origins() for name in _behind_the_product(n)]
    return [n for n in names if n not in _VIEWS and "fp4" not in n and n != "linear"] + shared


def _behind_the_product(node) -> list[str]:
    """Of a call of fp4.linear_epilogue, which is both where its lowering makes a template of the product."""
    if getattr(node.target, "_opname", None) != "linear_epilogue":
        return []
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs
    return [name for name in (given.get("act"), given.get("mul") and "mul", given.get("residual") and "add") if name]


class WatchOps(TorchDispatchMode):
    """Call ``seen(op, args)`` for every operator that reaches dispatch."""

    def __init__(self, seen: Callable[[Any, tuple], None]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen(func, args)
        return func(*args, **(kwargs or {}))
