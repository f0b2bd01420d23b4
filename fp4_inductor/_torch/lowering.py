"""What lowerings need of Inductor: registration, inlining of plain PyTorch, fallback calls, facts about symbols."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
from torch._inductor.graph import SubgraphLowering
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.pattern_matcher import get_mutation_region_id
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V, ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import guards, holding
from .fx import module_path
from .symbols import Bounds, guarded, interval, size_of_graph

aten = torch.ops.aten


def register(op, fn: Callable) -> None:
    """Register ``fn`` as the lowering of ``op``. Type promotion is off: it would promote uint8 and FP8 operands."""
    register_lowering(op, type_promotion_kind=None, broadcast=False)(fn)


def rows_of(x) -> sympy.Expr:
    """M: the product of the leading sizes."""
    m: sympy.Expr = sympy.Integer(1)
    for size in x.get_size()[:-1]:
        m = m * size
    return sympy.sympify(m)


class Symbols:
    """What is known of sizes in the graph being lowered. A pure interface, so that ``regime`` can be tested without a graph."""

    def covered(self, m: sympy.Expr) -> bool:
        """Is ``m`` a function of the graph's only dynamic size?"""
        return bool(m.free_symbols) and m.free_symbols == {_only_size()}

    def interval(self, m: sympy.Expr, given: Bounds | None) -> Bounds | None:
        """``(least, largest)`` of ``m`` by ``given``, the range of the graph's only dynamic size; or by what is checked, where guards are not.

        None: what torch knows counts (:meth:`at_most`, :meth:`above`).
        """
        if given is not None and self.covered(m):
            return interval(m, dict.fromkeys(m.free_symbols, given))
        if not m.free_symbols or V.graph.aot_mode or not _why_unchecked():
            return None
        marked = guards.promised(V.graph.sizevars.shape_env)
        return interval(m, {s: marked.get(s) or self._checked(s) for s in m.free_symbols})

    def _checked(self, s: sympy.Symbol) -> Bounds:
        """What is known of ``s`` without guards: the range of an unbacked size, which ``torch._check`` gave it and the graph checks."""
        of_torch = V.graph.sizevars.shape_env.var_to_range.get(s) if free_unbacked_symbols(s) else None
        return (0, None) if of_torch is None else (of_torch.lower, of_torch.upper)

    def at_most(self, m: sympy.Expr, bound: int) -> bool:
        """Is ``m <= bound`` proven?"""
        return V.graph.sizevars.statically_known_leq(m, bound)

    def above(self, m: sympy.Expr, bound: int) -> bool:
        """Is ``m > bound`` proven?"""
        return V.graph.sizevars.statically_known_gt(m, bound)

    def why_no_guard(self, m: sympy.Expr) -> str | None:
        """None if a guard on ``m`` would be kept; else the reason."""
        if V.graph.aot_mode:
            return "ahead-of-time compilation drops guards"
        if free_unbacked_symbols(m):
            return "M is unbacked (data-dependent)"
        if any(high is not None and high < sympy.Integer(2) ** 62 for _, high in self._marked(m)):
            return "mark_dynamic(min, max) spans several regimes, and a guard inside a promised range is an error"
        return guards.why_no_more(V.graph.sizevars.shape_env) or None

    def _marked(self, m: sympy.Expr) -> list[Bounds]:
        marked = guards.promised(V.graph.sizevars.shape_env)
        return [marked[s] for s in m.free_symbols if s in marked]

    def guard_at_most(self, m: sympy.Expr, bound: int) -> bool:
        """The truth of ``m <= bound`` for the example input, recorded as a guard of this graph."""
        V.graph.__dict__.setdefault("fp4_guarded", set()).add(m)
        return bool(V.graph.sizevars.evaluate_expr(sympy.Le(m, bound)))

    def guarded(self, m: sympy.Expr) -> bool:
        """Has this graph a guard from :meth:`guard_at_most`, or a pass, on ``m``?"""
        return m in V.graph.__dict__.get("fp4_guarded", ()) or m in guarded(V.graph.sizevars.shape_env)

    def hold(self, m: sympy.Expr, low: int, high: int | None, what: str) -> None:
        """Let the compiled graph raise before it computes something for an ``m`` below ``low`` or above ``high``; nothing for a number.

        ``what``: the kernel that this is for.
        """
        if V.graph.aot_mode and low <= 2:
            low = 0  # torch.export takes 2 for the least value of a size, and lets the graph be called with 1: the kernels for two rows serve one
        if m.free_symbols:
            holding.hold(m, low, high, what)

    def hint(self, m: sympy.Expr, fallback: int) -> int:
        """A likely value of ``m``; no guard."""
        return int(V.graph.sizevars.optimization_hint(m, fallback=fallback))

    def static_int(self, value) -> int | None:
        """A weight's size. ``dynamic=True`` makes weights that are graph inputs symbolic: guard on the size, or None."""
        value = sympy.sympify(value)
        if value.is_number:
            return int(value)
        return None if self.why_no_guard(value) else int(V.graph.sizevars.guard_int(value))


def is_constant(size) -> bool:
    """Is this size known, without a guard on it?"""
    return bool(sympy.sympify(size).is_number)


def _why_unchecked() -> str:
    """:func:`guards.why_unchecked` of the graph being lowered."""
    if "fp4_why_unchecked" not in V.graph.__dict__:
        V.graph.__dict__["fp4_why_unchecked"] = guards.why_unchecked(V.graph.sizevars.shape_env)
    return V.graph.__dict__["fp4_why_unchecked"]


def _only_size() -> sympy.Symbol | None:
    """The one symbol in the inputs of the whole graph; None if there are several, or none."""
    graph = V.graph
    while isinstance(graph, SubgraphLowering):
        graph = graph.parent
    # Of several, all but one may yet be found to be constants.
    if graph.__dict__.get("fp4_only_size") is None:
        graph.__dict__["fp4_only_size"] = size_of_graph(graph.graph)
    return graph.__dict__["fp4_only_size"]


def on_meta(call):
    """A NamedTuple of the arguments of an operator, with a tensor on the meta device for each IR value; where a size is symbolic, a likely one.

    Members that are NamedTuples are taken likewise.
    """
    return call._replace(**{name: _on_meta(x) for name, x in call._asdict().items()})


def _on_meta(x):
    if hasattr(x, "_asdict"):
        return on_meta(x)
    if not isinstance(x, ir.IRNode):
        return x

    def likely(sizes):
        return [int(V.graph.sizevars.optimization_hint(size, fallback=1)) for size in sizes]

    strides = x.maybe_get_stride()
    like = torch.empty(likely(x.get_size()), dtype=x.get_dtype(), device="meta")
    return like if strides is None else like.as_strided(like.shape, likely(strides))


def call_op(op, *args):
    """Emit a call of ``op`` as it is."""
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def inline(fn: Callable, args: Sequence[Any]):
    """Lower plain PyTorch ``fn(*args)`` in place: its operations fuse with their neighbours as if the user had written them."""
    tensors = [_input(a) for a in args]
    with V.fake_mode:
        fakes = [ir.ir_node_to_tensor(t) for t in tensors]
        gm = make_fx(fn, decomposition_table=_decompositions(), tracing_mode="real")(*fakes)
    return inline_subgraph_to_ir_nodes(gm, tensors, getattr(fn, "__name__", "fp4"))


@functools.cache
def _decompositions():
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _input(x):
    x = ir.ExternKernel.realize_input(x)
    return x if isinstance(x, ir.TensorBox) else ir.TensorBox(x)


def realized(x):
    """``x`` as a view of a buffer, which is made once however many readers there are."""
    x.realize()
    return x


def contiguous(x):
    """``x`` as a realised, contiguous, 16-byte aligned buffer (copied if it is not)."""
    x = ir.ExternKernel.require_contiguous(_input(x))
    if not V.graph.sizevars.statically_known_multiple_of(x.get_layout().offset * x.get_dtype().itemsize, 16):
        x = ir.ExternKernel.copy_input(x)
    return _input(x)


def view(x, size):
    return lowerings[aten.view.default](x, size)


def part(x, dim, start, stop):
    """``x`` from ``start`` to ``stop`` along ``dim``, a view."""
    return lowerings[aten.slice.Tensor](x, dim, start, stop)


def element(x, index):
    """``x[index]``, a view without dimension 0."""
    return lowerings[aten.select.int](x, 0, index)


def add(x, y):
    return lowerings[aten.add.Tensor](x, y)


def mul(x, y):
    return lowerings[aten.mul.Tensor](x, y)


def full(size, value, x):
    return lowerings[aten.full.default](list(size), value, dtype=x.get_dtype(), device=x.get_device())


def quantize_rows_e4m3(x, limit: float, smallest: float, order: tuple[tuple[int, int], ...] | None = None):
    """``(E4M3 [M, K], float32 [M, 1])`` of ``x [M, K]``, on CUDA, as pointwise operations and one reduction.

    Bit for bit what eager code computes, wherever Inductor fuses it: ``x`` is rounded to its dtype even if its producer's
    float32 value is at hand, and the two divisions of a row are IEEE's (Triton's ``/`` is an approximation).

    Args:
        limit: what the largest magnitude of a row becomes.
        smallest: lower bound of a scale; a row of zeros gets the scale 1.
        order: where k lies in a row of codes: (numbers, distance in memory) of the last digits of k, the highest first; None: at k.
    """
    rows, amax = _rows_and_peaks(x)

    def scale_of(peak):
        scale = ops.maximum(_divide(peak, ops.constant(limit, torch.float32)), ops.constant(smallest, torch.float32))
        return ops.where(ops.eq(peak, ops.constant(0.0, torch.float32)), ops.constant(1.0, torch.float32), scale)

    def inverse_of(scale):
        return _divide(ops.constant(1.0, torch.float32), scale)

    def code_of(value, inverse):
        return ops.to_dtype(
            ops.minimum(ops.maximum(ops.mul(value, inverse), ops.constant(-limit, torch.float32)), ops.constant(limit, torch.float32)), torch.float8_e4m3fn
        )

    scale = _elementwise(scale_of, torch.float32, amax)
    inverse = lowerings[aten.expand.default](_elementwise(inverse_of, torch.float32, scale), rows.get_size())
    codes = _elementwise(code_of, torch.float8_e4m3fn, rows, inverse)
    return codes if order is None else _in_order(codes, order), scale


def _in_order(x, order: tuple[tuple[int, int], ...]):
    """``x [M, K]``, not yet computed, written to a contiguous ``[M, K]`` whose columns lie in another order; see :func:`quantize_rows_e4m3`."""
    (m, k), load = x.get_size(), x.make_loader()
    digits, distances = zip(*order, strict=True)
    step = math.prod(digits)

    def at(index):
        row, column, *rest = index
        for digit, count in zip(rest, digits, strict=True):
            column = column * count + digit
        return load([row, column])

    apart: Any = ir.Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=at, ranges=[m, k // step, *digits])
    apart.realize()
    apart.data.data.freeze_layout_with_exact_strides([k, step, *distances])
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [m, k], [k, sympy.Integer(1)])
    return ir.TensorBox(ir.ReinterpretView(data=apart.data, layout=layout))


def row_scales(x, per_unit: float, smallest: float):
    """float32 ``[M, 1]``: the largest magnitude of each row of ``x [M, K]`` times ``per_unit``, as pointwise operations and one reduction.

    Bit for bit what eager code computes. At least ``smallest``; 1 for a row of zeros, NaN for one that holds NaN or Inf.
    """
    _, amax = _rows_and_peaks(x)

    def scale_of(peak):
        zero, one, inf, nan = (ops.constant(v, torch.float32) for v in (0.0, 1.0, float("inf"), float("nan")))
        scale = ops.maximum(ops.mul(peak, ops.constant(per_unit, torch.float32)), ops.constant(smallest, torch.float32))
        return ops.where(ops.lt(peak, inf), ops.where(ops.eq(peak, zero), one, scale), nan)

    return _elementwise(scale_of, torch.float32, amax)


def _rows_and_peaks(x):
    """``x [M, K]`` rounded to its dtype, as float32; and the largest magnitude of each row ``[M, 1]``."""
    rows = _elementwise(lambda v: ops.to_dtype(ops.to_dtype(v, x.get_dtype(), use_compute_types=False), torch.float32), torch.float32, x)
    return rows, lowerings[aten.amax.default](lowerings[aten.abs.default](rows), [-1], True)


def _divide(a, b):
    return ops.inline_asm_elementwise(a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32, is_pure=True, pack=1)


def _elementwise(fn: Callable, dtype: torch.dtype, *inputs):
    loaders = [x.make_loader() for x in inputs]
    return ir.Pointwise.create(
        device=inputs[0].get_device(), dtype=dtype, inner_fn=lambda index: fn(*(load(index) for load in loaders)), ranges=list(inputs[0].get_size())
    )


def once_per_graph(kind: str, x, make: Callable[[Any], Any]):
    """``make(x)`` for a realised ``x``, made once for each tensor of a graph that no operation changes between its readers."""
    x = _input(x)
    layout, node = x.get_layout(), V.graph.current_node
    region = None if node is None else get_mutation_region_id(node.graph, node)
    key = (kind, x.get_name(), tuple(layout.size), tuple(layout.stride), layout.offset, region)
    made = V.graph.__dict__.setdefault("fp4_made", {})
    if key not in made:
        made[key] = make(x)
    return made[key]


def remember(x, what):
    """``x``, realised; ``what`` it is made from, for :func:`made_from`."""
    V.graph.__dict__.setdefault("fp4_made_from", {})[realized(x).get_name()] = what
    return x


def made_from(x):
    """What was remembered of the buffer all of whose rows ``x`` has, in their order; None if nothing was."""
    what = V.graph.__dict__.get("fp4_made_from", {}).get(x.get_name())
    if what is None:
        return None
    layout, buffer, same = x.get_layout(), V.graph.get_buffer(x.get_name()), V.graph.sizevars.statically_known_equals
    whole = layout.offset == 0 and layout.is_contiguous() and layout.dtype == buffer.get_dtype()
    rows = same(layout.size[-1], buffer.get_size()[-1]) and same(sympy_product(layout.size), sympy_product(buffer.get_size()))
    return what if whole and rows else None


def buffer_name(x) -> str | None:
    """The name of the buffer behind an IR value, if it is realised."""
    try:
        return x.get_name()
    except (AttributeError, NotImplementedError):
        return None


def current_names() -> tuple[str, str]:
    """``(FX node name, innermost module path)`` of the node being lowered, for explain()."""
    node = V.graph.current_node
    return ("", "") if node is None else (node.name, module_path(node))


def in_every_layer(path: str) -> list[str]:
    """``path``, that of a module in the graph being lowered, and its like in the other layers for which this graph is called.

    A region (``torch.compiler.nested_compile_region``) is lowered once; its paths are those of its first call.
    """
    around: Any = V.graph.parent.current_node if isinstance(V.graph, SubgraphLowering) else None
    if around is None or around.target is not torch.ops.higher_order.invoke_subgraph:
        return [path]
    first = module_path(around)
    calls = [node for node in around.graph.nodes if node.target is around.target and node.args[0].target == around.args[0].target]
    if not first or not f"{path}.".startswith(f"{first}."):
        return [path] * len(calls)
    return [module_path(call) + path.removeprefix(first) for call in calls]


def current_meta(key: str) -> Any:
    """``meta[key]`` of the FX node being lowered, or None."""
    node = V.graph.current_node
    return None if node is None else node.meta.get(key)


def argument(name: str, place: int) -> torch.fx.Node | None:
    """The node of argument ``name``, number ``place``, of the FX node being lowered; None if it is none."""
    node = V.graph.current_node
    given = None if node is None else node.kwargs.get(name, node.args[place] if len(node.args) > place else None)
    return given if isinstance(given, torch.fx.Node) else None


def max_autotune() -> bool:
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)
