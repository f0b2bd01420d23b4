"""A compiled graph checks at each call that M lies where the kernels that it was compiled for serve.

The guards of Dynamo can be dropped after the compilation (``AOTCompiledFunction.disable_guard_check``,
``set_stance(skip_guard_eval_unsafe=True)``, a compiler that keeps the graph and forgets the guards), and a promise can be broken.
The check is one comparison on the host for each M of a graph.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves


def hold(m: sympy.Expr, low: int, high: int | None, what: str) -> None:
    """Raise ``fp4_inductor.errors.RowsError`` in the generated code if not ``low <= m <= high``. ``what``: the kernel that needs it."""
    if low <= 0 and high is None:
        return
    held: dict[sympy.Expr, HeldRows] = V.graph.__dict__.setdefault("fp4_held", {})
    if m not in held:
        held[m] = HeldRows(m, _device())
        V.graph.register_buffer(held[m], set_name=True)
        V.graph.register_operation(held[m])
    held[m].narrow(low, high, what)


def _device() -> torch.device:
    tensors = (v for v in tree_leaves(V.graph.current_node.meta["val"]) if isinstance(v, torch.Tensor))
    return next(tensors).device


class HeldRows(ir.AssertScalar):
    """``low <= m <= high`` in front of the kernels of one graph: the narrowest bounds of all of them."""

    def __init__(self, m: sympy.Expr, device: torch.device):
        super().__init__(sympy.true, "")
        self.m, self.low = m, 0
        self.high: int | None = None
        self.whose: dict[str, str] = {}
        # In place of the CPU of ir.AssertScalar: partitions for CUDA graphs end at a node of another device.
        self.layout = ir.NoneLayout(device=device)

    def narrow(self, low: int, high: int | None, what: str) -> None:
        if low > self.low:
            self.low, self.whose["low"] = low, what
        if high is not None and (self.high is None or high < self.high):
            self.high, self.whose["high"] = high, what

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        return free_unbacked_symbols(self.m) if unbacked_only else free_symbols(self.m)

    def codegen(self, wrapper: Any) -> None:
        if V.graph.fx_wrapper:
            return
        cpp = V.graph.cpp_wrapper
        # Not simplified: a guard that says the same would make it true.
        m = (wrapper.codegen_cpp_sizevar if cpp else wrapper.codegen_python_sizevar)(self.m, simplify=False)
        tests = ([f"{m} < {self.low}"] if self.low > 0 else []) + ([f"{m} > {self.high}"] if self.high is not None else [])
        what = "; ".join(dict.fromkeys(self.whose.values()))
        if cpp:
            limit = f"M >= {self.low}" if self.high is None else f"M = {self.low} to {self.high}" if self.low else f"M <= {self.high}"
            text = f"fp4_inductor: a graph that was compiled for {limit} activation rows ({what}) was called with M = "
            wrapper.writeline(f'if ({" || ".join(tests)}) {{ throw std::runtime_error("{text}" + std::to_string({m})); }}')
        else:
            wrapper.writeline(f"if {' or '.join(tests)}:")
            wrapper.writeline("    import fp4_inductor.errors")
            wrapper.writeline(f"    raise fp4_inductor.errors.RowsError.outside({m}, {self.low}, {self.high}, {what!r})")
            wrapper.writeline(f"{self.get_name()} = None")
