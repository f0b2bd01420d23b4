"""A kernel's form as IR: what :mod:`fp4_inductor.kernels.run` launches in an eager call, inside a compiled graph."""

from __future__ import annotations

import functools
from typing import Any

from .._torch import lowering as inductor
from .._torch.template import Template
from ..kernels import select
from ..kernels.forms import Composed, Problem, Size, Triton, source
from ..kernels.kernel import Span
from .quantize_rows import quantized_rows
from .regime import likely


def product(row: Span, x, weight: tuple, p: Problem, m):
    """IR of ``x [M, K] @ W.T`` by the kernel of ``row``, which is a Triton launch or composed of torch operators; m of ``p`` is set here."""
    form = row.implementation.form
    if isinstance(form, Triton):
        if form.likely:
            m_of_tile = min(likely(m, inductor.Symbols(), form.likely), row.max_m or form.likely)
        else:
            m_of_tile = int(m) if m.is_number else row.max_m or 1
        return launched(form, (x, *weight), p._replace(m=m_of_tile), m)
    if isinstance(form, Composed):
        return composed(form, quantized_rows(x) if form.rounded == "fp8" else (x,), weight, p)
    raise TypeError(f"a kernel of this form has none inside generated code: {form}")


def launched(form: Triton, inputs: tuple, p: Problem, m):
    """IR of one Triton launch ``[m, N]`` in ``p.dtype``; inputs are made contiguous and aligned."""
    arguments = tuple(inductor.contiguous(t) for t in inputs)
    return template(form).lower(arguments, [m, p.n], p.dtype, form.options(p, inductor.max_autotune()))


@functools.cache
def _template(name: str, function: str, inputs: tuple, sizes: tuple[Size, ...], grid: Any) -> Template:
    expressions = {s.name: f'{{{{size("{s.tensor}", {s.dim})}}}}{_then("*", s.times)}{_then("//", s.over)}' for s in sizes}
    return Template(name, source(function), inputs, expressions, grid)


def _then(sign: str, number: int) -> str:
    return f" {sign} {number}" if number != 1 else ""


def template(form: Triton) -> Template:
    """The template of ``form``; one for all forms of one source and name."""
    grid: Any = form.grid
    return _template(form.template, form.function, form.inputs, form.sizes, grid)


def composed(form: Composed, activations: tuple, weight: tuple, p: Problem):
    """IR of the operators of ``form``, which fuse with their neighbours; the bias is added behind it."""

    def product(*tensors):
        return form.product(tensors[: len(activations)], tensors[len(activations) :], p, None)

    return inductor.inline(product, (*activations, *weight))


def problem(x, n: int, k: int, bounds: tuple[int, ...] = ()) -> Problem:
    """Of activations ``x``; m is not known."""
    return Problem(0, n, k, select.arch_of(x.get_device()), x.get_dtype(), bounds)
