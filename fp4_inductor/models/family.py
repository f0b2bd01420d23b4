"""What a model family is to a quantizer: data, read by :mod:`.plan`. A new family is one file with a ``FAMILY``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Skip:
    """Layers that stay in high precision by default.

    Args:
        pattern: regular expression searched in the dotted name of the module that owns the weight.
        reason: one clause for the report.
        when: a further condition on the owning module; None means always.
        part: the rule is for a part of a larger model, and does not apply to a model that would have nothing left to quantize.
    """

    pattern: str
    reason: str
    when: Callable[[nn.Module], bool] | None = None
    part: bool = False

    def matches(self, name: str, module: nn.Module) -> bool:
        return re.search(self.pattern, name) is not None and (self.when is None or self.when(module))


@dataclass(frozen=True)
class Experts:
    """Where a family keeps its expert weights.

    Args:
        owner: regular expression matched against the whole class name of the module that owns the Parameters.
        layouts: Parameter name -> its dimensions, ``"[E, N, K]"`` (K contiguous, what a matmul in FP4 wants) or
            ``"[E, K, N]"``.
        dense: the module is called with every expert's tokens one after the other, ``[E * T, H]``, and computes
            ``act_fn(gate) * up`` on the two halves of the first product. Without it, what a module computes is read from
            transformers' experts interface, and a module without that interface is refused.
    """

    owner: str
    layouts: tuple[tuple[str, str], ...]
    dense: bool = False


@dataclass(frozen=True)
class Stack:
    """3-D Parameters that are no expert weights in transformers' layout.

    Args:
        owner: regular expression matched against the whole class name of the module whose forward uses the Parameter.
        parameter: regular expression matched against the Parameter's whole name.
        reason: one clause for the report: why it stays in high precision.
        quantized: its dimensions, ``"[E, N, K]"`` or ``"[E, K, N]"``, if it is quantized: the module takes one matrix at a time,
            by an integer index, and calls ``F.linear`` or ``matmul`` with it. Empty: it stays.
    """

    owner: str
    parameter: str
    reason: str = ""
    quantized: str = ""


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: as in the report and in errors.
        skips: default skip rules; they apply to every model, so patterns must be specific.
        experts: 3-D expert Parameters of this family.
        stacks: other 3-D Parameters; like ``skips``, they apply to every model.
        linears: ``(module path, class name)`` of linear layers that are no ``nn.Linear`` but hold ``weight [K, N]``
            and ``bias [N]`` and compute ``x @ weight + bias``.
        siblings: names, within one parent module, of linear layers that usually read the same input, in the order in
            which they are packed. A wrong entry costs nothing: calls on different inputs are simply not merged.
    """

    name: str
    skips: tuple[Skip, ...] = ()
    experts: tuple[Experts, ...] = ()
    stacks: tuple[Stack, ...] = ()
    linears: tuple[tuple[str, str], ...] = ()
    siblings: tuple[tuple[str, ...], ...] = ()
