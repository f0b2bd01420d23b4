"""What a layer computes between its two products: found by evaluating it, not by its spelling.

``x * sigmoid(x)``, ``x / (1 + exp(-x))``, ``silu`` kept whole, computed in float32 or not: the graph between the products
is evaluated in float64 at sample values of gate and up, and is the activation whose formula gives the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from ..._torch.fx import constant_of, without_modes
from ...errors import ConfigError
from ...ops.activation import ACTIVATIONS, Activation
from ..pointwise import is_elementwise
from .index import Unproven

_TOLERANCE = 1e-6
_SAMPLES = 512
_MOST_CONSTANTS = 8


@dataclass(frozen=True)
class Operation:
    """An elementwise operation; arguments are trees, ``int`` for output number i of the first product, or ``Literal``."""

    op: Any
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Literal:
    """A constant: an argument as it is, or a tensor filled with it."""

    value: Any
    tensor: bool = False


@dataclass(frozen=True)
class OutputNumber:
    """Output ``number`` of the first product."""

    number: int


Tree: TypeAlias = Operation | Literal | OutputNumber


@dataclass
class Formula:
    """The product of ``factors``: functions of the outputs of the first product."""

    factors: list[Tree] = field(default_factory=list)

    def __call__(self, outputs: list[Tensor]) -> Tensor:
        out = torch.ones_like(outputs[0])
        for factor in self.factors:
            out = out * _evaluate(factor, outputs)
        return out


def _evaluate(tree: Tree, outputs: list[Tensor]) -> Any:
    if isinstance(tree, OutputNumber):
        return outputs[tree.number]
    if isinstance(tree, Literal):
        return torch.tensor(tree.value, dtype=torch.float64) if tree.tensor else tree.value
    return tree.op(*(_evaluate(a, outputs) for a in tree.args), **dict(tree.kwargs))


def identify(formula: Formula, outputs: int, interleaved: bool) -> Activation:
    """The activation that ``formula`` computes from ``outputs`` (1, or 2: gate and up).

    Raises:
        Unproven: it is none that fp4.moe has; the operations are named.
    """
    with without_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        # wide enough that clamps and both tails of every nonlinearity are reached
        samples = [torch.cat([torch.randn(_SAMPLES, generator=generator, dtype=torch.float64) * s for s in (1.0, 8.0)]) for _ in range(outputs)]
        try:
            got = formula(samples)
        except (RuntimeError, TypeError) as e:
            raise Unproven(f"an activation that cannot be evaluated: {e}", 3) from e
        for name, alpha, limit in _candidates(formula):
            try:
                known = Activation(name, alpha, limit, interleaved)
            except ConfigError:
                continue
            if known.needs_gate and outputs == 1:
                continue
            if _same(got, known, samples):
                return known
            if outputs == 2 and _same(got, known, samples[::-1]):
                raise Unproven("up stands in front of gate, which fp4.moe does not store", 3)
    raise Unproven(f"an activation that fp4.moe does not have, computed by {', '.join(_operations(formula))}", 3)


def _same(got: Tensor, known: Activation, samples: list[Tensor]) -> bool:
    want = known(torch.stack(samples, -1), 1).squeeze(-1)
    return got.shape == want.shape and bool(((got - want).abs() <= _TOLERANCE * (1 + want.abs())).all())


def _candidates(formula: Formula) -> list[tuple[str, float, float | None]]:
    constants = sorted({abs(float(v)) for f in formula.factors for v in _literals(f) if isinstance(v, (int, float)) and not isinstance(v, bool)})
    constants = [c for c in constants if c > 0][:_MOST_CONSTANTS]
    alphas, limits = [1.0, *(c for c in constants if c != 1.0)], [None, *constants]
    return [(name, a, m) for name, (_, sloped) in ACTIVATIONS.items() for a, m in itertools.product(alphas if sloped else [1.0], limits)]


def _literals(tree: Tree) -> list[Any]:
    if isinstance(tree, Operation):
        return [v for a in tree.args for v in _literals(a)] + [v for _, v in tree.kwargs]
    if isinstance(tree, Literal):
        return [tree.value]
    return []


def _operations(formula: Formula) -> list[str]:
    """The names of the operations, in order of first use."""
    names: dict[str, None] = {}

    def walk(tree: Tree) -> None:
        if isinstance(tree, Operation):
            for a in tree.args:
                walk(a)
            names[tree.op._opname if hasattr(tree.op, "_opname") else str(tree.op)] = None

    for factor in formula.factors:
        walk(factor)
    return list(names) or ["nothing"]


def call_of(node: Node, operand: Callable[[Node], Tree]) -> Tree | None:
    """``node`` as a tree, its tensor operands by ``operand``; None if it is not elementwise."""
    if node.op == "get_attr":
        table = constant_of(node)
        if table is None or table.numel() != 1:
            return None
        with without_modes():
            return Literal(float(table), tensor=True)
    if node.op != "call_function" or not is_elementwise(node.target):
        return None
    args = []
    for a in node.args:
        if isinstance(a, (list, tuple)):
            return None
        args.append(operand(a) if isinstance(a, Node) else Literal(a))
    if any(isinstance(v, Node) for v in node.kwargs.values()):
        return None
    return Operation(node.target, tuple(args), tuple(node.kwargs.items()))
