"""Ops that write their arguments, inside of a region (``torch.compiler.nested_compile_region``).

Elsewhere torch functionalizes such an op by itself: it becomes ``auto_functionalized_v2``. The graph of a region is functionalized once more, by
``torch.func.functionalize``, whose rules are those of torch's own operators; any other one that writes is an error ("Found a custom (non-ATen) operator whose
output has alias annotations", torch 2.11 to 2.13). So the op gets a rule of its own there: it becomes a *twin* that writes nothing and returns what would have
been written. :func:`restored` makes of the twins in a graph what torch makes of the op elsewhere, which Inductor knows how to run without a copy.

The rule is known to torch's Python dispatcher alone, under which graphs are traced: an op with a rule in C++ is no longer functionalized elsewhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.fx import Graph

Op = torch._ops.OpOverload
TWINS: dict[Op, Op] = {}  # of an op that writes: that which returns instead


@functools.cache  # eager calls ask, and the schema is slow to read
def written(op: Op) -> tuple[str, ...]:
    """The names of the arguments that a call writes."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def arguments_of(op: Op, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    given = {a.name: a.default_value for a in op._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | kwargs


def give_twin(library: torch.library.Library, op: Op, schema: str, fake: Callable) -> None:
    """Define ``<op>_functional`` and the rule that calls it.

    Args:
        schema: of ``op``, as it was defined: arguments and one tensor that it returns.
        fake: of ``op``.
    """
    names = written(op)
    arguments, _, returned = schema.rpartition(" -> ")
    arguments = re.sub(r"\([a-z]!\)", "", arguments)
    name = f"{op._opname}_functional"
    library.define(f"{name}{arguments} -> ({', '.join([returned] + [returned] * len(names))})", tags=(torch.Tag.pt2_compliant_tag, *_strides(op)))

    def run(*args: Any, **kwargs: Any) -> tuple:
        given = arguments_of(op, args, kwargs)
        copies = {n: given[n].clone() for n in names if given[n] is not None}
        return (op(**given | copies), *(copies.get(n, _nothing(given)) for n in names))

    def run_fake(*args: Any, **kwargs: Any) -> tuple:
        given = arguments_of(op, args, kwargs)
        return (fake(**given), *(_nothing(given) if given[n] is None else torch.empty_like(given[n]) for n in names))

    def rule(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(op, args, kwargs)
        torchs: Any = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())  # type: ignore[arg-type]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            result, *new = twin(**torchs.unwrap_tensors(given))
        for n, x in zip(names, new, strict=True):
            if given[n] is not None:
                torchs.replace(given[n], x)
                torchs.commit_update(given[n])
                torchs.sync(given[n])
        return torchs.wrap_tensors(result)

    def _nothing(given: dict[str, Any]) -> torch.Tensor:
        return given[names[0]].new_empty(0)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", run_fake, lib=library)
    twin = getattr(getattr(torch.ops, library.ns), name).default
    op.py_impl(torch._C.DispatchKey.Functionalize)(rule)
    TWINS[op] = twin


def _strides(op: Op) -> tuple:
    kept = (torch.Tag.flexible_layout, torch.Tag.needs_fixed_stride_order)
    return tuple(tag for tag in op.tags if tag in kept)


def restored(graph: Graph) -> None:
    """Each twin in ``graph`` becomes ``auto_functionalized_v2`` of its op."""
    for op, twin in TWINS.items():
        for node in graph.find_nodes(op="call_function", target=twin):
            names = written(op)
            given = arguments_of(op, node.args, node.kwargs)
            bases = [given.pop(n) for n in names]
            there = [base for base in bases if base is not None]
            index = {f"_{n}_base_index": None if base is None else there.index(base) for n, base in zip(names, bases, strict=True)}
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (op,), {**given, **index, "_all_bases": there})
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
