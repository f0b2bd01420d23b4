"""Turn an ordinary Triton kernel into an Inductor template, so that eager and compiled code are one source.

Convention for such a kernel: it ends with ``store_output(Y, idx_m, idx_n, y, mask, N)``; the parameters named in
``inputs`` are tensors; those in ``sizes`` are numbers, given here as lines of Jinja over the inputs; the rest are
constexprs. The template is the kernel's own body with that last line replaced by Inductor's ``store_output``, behind
which epilogues are fused, followed by the source of the Triton functions that it calls.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel, autotune_select_algorithm

_STORE = '{{store_output(("idx_m", "idx_n"), "y", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}'


def source_of(kernel, inputs: tuple[str, ...], sizes: dict[str, str]) -> str:
    """The Jinja source of the template, the functions that it calls behind it."""
    text = textwrap.dedent(inspect.getsource(kernel.fn))
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    first, last = function.body[0], function.body[-1]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        first = function.body[1]
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and getattr(last.value.func, "id", "") == "store_output"):
        raise ValueError(f"{kernel.fn.__name__} must end with store_output(...)")
    lines = text.splitlines()
    body = lines[first.lineno - 1 : last.lineno - 1]
    arguments = ", ".join(f'"{name}"' for name in inputs)
    prelude = [f"    {name} = {expression}" for name, expression in sizes.items()]
    tails = [textwrap.dedent(inspect.getsource(h.fn)) for h in called(kernel) if h.fn.__name__ != "store_output"]
    return "\n".join([f"{{{{def_kernel({arguments})}}}}", *prelude, *body, f"    {_STORE}", "", *tails])


def called(kernel) -> list:
    """The Triton functions that ``kernel`` calls, directly or not, each behind those that it calls."""
    found: dict[str, Any] = {}

    def visit(function) -> None:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
            if isinstance(node, ast.Name) and node.id not in found:
                other = function.fn.__globals__.get(node.id)
                if type(other) is type(kernel):
                    visit(other)
                    found.setdefault(node.id, other)

    visit(kernel)
    return list(found.values())


class _Kernel(TritonTemplateKernel):
    def jit_lines(self):
        # Our kernels read scales as bytes. Triton refuses the very mention of a pointer to E4M3 before sm_89.
        return super().jit_lines().replace("'arg_SCALE': '*fp8e4nv'", "'arg_SCALE': '*u8'")


class _TritonTemplate(TritonTemplate):
    kernel_type = _Kernel


class Template:
    """One Inductor template made from one kernel."""

    def __init__(self, name: str, kernel, inputs: tuple[str, ...], sizes: dict[str, str], grid: Callable):
        self.name = name
        self.template = _TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source_of(kernel, inputs, sizes))

    def lower(self, arguments: tuple, size: list, dtype, configs: list[dict[str, Any]]):
        """IR of the kernel over realised ``arguments``; several ``configs`` are benchmarked by Inductor, one is taken as it is."""
        layout = ir.FixedLayout(arguments[0].get_device(), dtype, size)
        choices: list[Any] = []
        for config in configs:
            error = self.template.maybe_append_choice(choices, input_nodes=arguments, layout=layout, **config)
            if error is not None:
                raise error
        result = autotune_select_algorithm(self.name, choices, list(arguments), layout)
        return result[0] if isinstance(result, tuple) else result  # (node, choice) from torch 2.12
