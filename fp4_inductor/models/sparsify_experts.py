"""The experts of one module, each weight 2:4-sparse or dense NVFP4: expert by expert, from the tokens that each one saw.

To be pruned, an expert that saw few tokens borrows from those that its layer routed elsewhere, and the report names it. What it never saw says
something about what it may see: on austen_moe (K = 128, SparseGPT) borrowing up to 8 * K tokens costs less than going without at every size of
calibration below that, +0.231 nats per byte against +0.316 with 512 tokens, +0.115 against +0.134 with 4,096.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..formats.hessian import output_energy
from ..modules import FP4ExpertWeight, Sparse24ExpertWeight
from .calibrate_experts import Statistics, between
from .choose import Candidate
from .convert import experts_row, install_experts, move, moved, rows_to_pad, unpadded
from .coverage import LayerReport
from .hessian import Moments, moments_of
from .plan import ExpertsTarget
from .prune import ENOUGH, PRUNERS, Method, dense_layer, is_24, rows_needed, sparse_layer
from .routed import RoutedInputs

_NAMED = 16
_ENOUGH = 8  # rows of input per channel up to which an expert borrows tokens


@dataclass
class _Error:
    """Squared errors and squared norms, summed over experts."""

    weight: list[float] = field(default_factory=lambda: [0.0, 0.0])
    output: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, w: Tensor, q: Tensor, hessian: Tensor | None, rows: int) -> None:
        """``w``, ``q`` float32 ``[N, K]``; the outputs of an expert count as often as it has ``rows`` of input."""
        for sums, h, times in ((self.weight, None, 1), (self.output, hessian, rows)):
            for i, t in enumerate((w - q, w)):
                sums[i] += times * output_energy(t, h)

    @staticmethod
    def relative(sums: list[float]) -> float:
        return math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else 0.0


@dataclass
class PrunedExperts:
    """One weight of a module of experts. ``error`` of the weights, ``output`` over calibration inputs (else None), ``score`` for a budget."""

    target: ExpertsTarget
    attribute: str
    weight: FP4ExpertWeight
    pad: tuple[int, int]
    error: float
    output: float | None
    score: float
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return weight_name(self.target, self.attribute)

    def dense(self) -> Tensor:
        """In the layout of the module's own Parameter."""
        with moved(self.weight, self.target.stack(self.attribute).device):
            w = unpadded(self.weight.dequantize(), self.weight.columns, self.pad)
        return w.mT if self.target.spec.transposed else w

    def candidate(self) -> Candidate:
        return Candidate(self.name, self.target.module.get_parameter(self.attribute), self.dense, self.score)


def weight_name(target: ExpertsTarget, attribute: str) -> str:
    """The name of one weight, as in the report."""
    return f"{target.name}.{attribute}" if target.name else attribute


def expert_weights(target: ExpertsTarget) -> dict[str, Tensor]:
    """Both weights by name."""
    return {weight_name(target, a): target.stack(a) for a in target.spec.parameters[:2]}


def matrix(target: ExpertsTarget, p: Tensor, e: int) -> Tensor:
    """``[N, K]`` of one expert, a view."""
    return p.detach()[e].mT if target.spec.transposed else p.detach()[e]


def quantize_experts(
    target: ExpertsTarget,
    config: Method,
    sparse: set[str],
    device: torch.device | None,
    inputs: RoutedInputs | None = None,
    statistics: Statistics | None = None,
    sequential: bool = False,
) -> list[PrunedExperts]:
    """Both weights of ``target``, which is not changed.

    Args:
        sparse: names (:func:`weight_name`) of the weights to be sparse. A method that needs ``inputs`` and has none leaves them dense.
        device: where the packed weights go; None: where they are.
        inputs: what the experts were fed with; needed by ``config.pruning`` that needs data.
        statistics: E[x^2] of each expert's inputs, for ``scale_search="activation"`` without ``inputs``, and in place of "gptq" for experts with
            too few tokens.
        sequential: the second product is calibrated behind the new first one, and both against what ``inputs`` knows of the dense model.
    """
    spec, module = target.spec, target.module
    known = inputs if inputs is not None and inputs.seen else None
    notes: tuple[str, ...] = statistics.notes if statistics is not None and known is None else ()
    if config.pruning in PRUNERS and known is None:
        sparse = set()
        notes += ("not reached by calibration: dense, unweighted scales",) if statistics is None else ()
    names = {a: weight_name(target, a) for a in spec.parameters[:2]}
    kinds = {a: Sparse24ExpertWeight if names[a] in sparse else FP4ExpertWeight for a in names}
    pads = rows_to_pad(target, kinds["down_proj"].storage().k_multiple)
    columns = {a: matrix(target, module.get_parameter(a), 0).shape[1] for a in names}
    needed = _ENOUGH * max(rows_needed(config, k) for k in columns.values()) if config.pruning in PRUNERS else 0
    packed = {a: empty_weight(kinds[a], target, a, pads[a], device) for a in names}
    errors = {a: _Error() for a in names}
    for e in range(packed[spec.first].num_experts):
        x, x0 = known.inputs(e, needed) if known is not None else (None, None)
        x0 = x0 if sequential else None
        for attribute in names:
            w = matrix(target, module.get_parameter(attribute), e)
            w = w if device is None else w.to(device)
            moments = Moments()
            if known is not None and x is not None and len(x):
                weights = known.weights(e, int(attribute != spec.first), x)
                moments = moments_of(*(None if t is None else t.to(w.device) for t in (x, x0, weights)))  # type: ignore[arg-type]
            square = None if statistics is None else (statistics.first if attribute == spec.first else statistics.down)[e].to(w.device)
            make = sparse_layer if names[attribute] in sparse else dense_layer
            layer = make(_padded(w, *pads[attribute]), config, moments, square)
            packed[attribute].put(e, layer.parts())
            q = unpadded(layer.dequantize(torch.float32), columns[attribute], pads[attribute])
            hessian = moments.mean()
            errors[attribute].add(w.float(), q, hessian if hessian is not None or square is None else torch.diag(square), max(moments.rows, 1))
            if attribute == spec.first and x is not None:
                new = q.to(x.device, w.dtype) if sequential else None
                x0 = None if x0 is None else between(module, spec, e, x0)
                x = between(module, spec, e, x, new)
    if known is not None:
        notes += _short(known, needed) if config.pruning in PRUNERS else _few(known)
    return [
        PrunedExperts(
            target, a, packed[a], pads[a], _Error.relative(errors[a].weight),
            None if known is None else _Error.relative(errors[a].output), _Error.relative(errors[a].output), notes,
        )
        for a in names
    ]  # fmt: skip


def install_packed(model: nn.Module, both: list[PrunedExperts], prefill: str, device: torch.device | None) -> tuple[nn.Module, list[LayerReport]]:
    """Put FP4Experts in place of the module, on ``device`` or where it is; returns the model and the report's rows."""
    target = both[0].target
    for p in both:
        move(p.weight, target.stack(p.attribute).device if device is None else device)
    rows = [replace(experts_row(target, p.attribute, p.weight, p.error, p.notes), output_error=p.output) for p in both]
    return install_experts(model, target, {p.attribute: p.weight for p in both}, {p.attribute: p.pad for p in both}, prefill), rows


def put_dense(both: list[PrunedExperts]) -> None:
    """The quantized weights in the module that is still there, rounded to its dtype: what comes after it is calibrated behind them."""
    for p in both:
        parameter = p.target.module.get_parameter(p.attribute)
        parameter.data = p.dense().to(parameter.device, parameter.dtype)


def not_24(target: ExpertsTarget, p: Tensor) -> int:
    """How many experts of one weight are not 2:4."""
    return sum(not is_24(matrix(target, p, e)) for e in range(p.shape[0]))


def empty_weight(kind: type[FP4ExpertWeight], target: ExpertsTarget, attribute: str, pad: tuple[int, int], device: torch.device | None) -> FP4ExpertWeight:
    """For one weight of ``target``, all zeros. ``device``: None: that of the dense weight."""
    p = target.stack(attribute)
    rows, columns = matrix(target, p, 0).shape
    k = columns + -columns % kind.storage().k_multiple
    options: dict[str, Any] = dict(rows=rows, columns=columns, dtype=p.dtype, device=p.device if device is None else device)
    return kind(p.shape[0], rows + pad[0] * pad[1], k, **options)


def _padded(w: Tensor, parts: int, rows: int) -> Tensor:
    return torch.cat([nn.functional.pad(p, (0, 0, 0, rows)) for p in w.chunk(parts)]) if rows else w


def _few(inputs: RoutedInputs) -> tuple[str, ...]:
    few = sorted((count, e) for e, count in enumerate(inputs.tokens) if count < ENOUGH)
    if not few:
        return ()
    return (f'{len(few)} of {inputs.experts} experts met fewer than {ENOUGH} tokens ({_named(few)}): "activation" for them',)


def _named(counts: list[tuple[int, int]]) -> str:
    return ", ".join(f"{e} saw {count}" for count, e in counts[:_NAMED]) + (f", ... {len(counts) - _NAMED} more" if len(counts) > _NAMED else "")


def _short(inputs: RoutedInputs, needed: int) -> tuple[str, ...]:
    short = sorted((count, e) for e, count in enumerate(inputs.tokens) if count < needed)
    if not short:
        return ()
    who = f"{len(short)} of {inputs.experts} experts saw fewer than {needed} calibration tokens ({_named(short)})"
    return (f"{who}: other tokens of the layer stood in for the rest",)
