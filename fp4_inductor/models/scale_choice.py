"""Which scale search each weight of one model gets, and the channel weights it needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import NVFP4Config, ScaleSearch
from ..errors import CalibrationError, NonFiniteError
from ..modules import FP4Linear
from . import gptq, self_calibration
from .calibrate import batches_of, statistics
from .plan import ExpertsTarget, QuantizationPlan, Target
from .probe import Probe
from .siblings import planned, shared_global_scale
from .sparsify_experts import PrunedExperts

_UNWEIGHTED: ScaleSearch = "mse"  # the same sweep as "activation", without data
_NO_DATA: ScaleSearch = "four_over_six"  # the best perplexity where there is no data at all (benchmarks/results/quality_*.csv)


@dataclass
class ScaleChoice:
    """What one model gets.

    Args:
        config: the search actually used.
        weights: for ``"activation"`` and ``"gptq"``, by the name of a group or of a module of experts: E[x^2] ``[K]``, the experts'
            :class:`.calibrate_experts.Statistics`, or None where no token came.
        notes: for the report: how ``"auto"`` was decided, what ``"gptq"`` worked with.
        head_inputs: by the name of an output head: some of its inputs.
        probe: for ``prefill="nvfp4"``, where there is calibration data: the dense model's logits.
        ready: by the name of a group's first layer: the layer that ``"gptq"`` made of its weight, and its relative error.
        experts: by the name of a module of experts: what ``"gptq"`` made of its weights.
        global_scales: by layer name, those that siblings of ``"gptq"`` share.
    """

    config: NVFP4Config
    weights: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    head_inputs: dict[str, Any] = field(default_factory=dict)
    probe: Probe | None = None
    ready: dict[str, tuple[FP4Linear, float]] = field(default_factory=dict)
    experts: dict[str, list[PrunedExperts]] = field(default_factory=dict)
    global_scales: dict[str, Tensor] = field(default_factory=dict)

    def of(self, item: list[Target] | ExpertsTarget) -> tuple[NVFP4Config, Any, tuple[str, ...]]:
        """``(config, channel weights, notes)`` for the weight that a group shares, or for a module of experts."""
        if self.config.scale_search not in ("activation", "gptq"):
            return self.config, None, ()
        # What "gptq" has no layer for gets "activation".
        config = replace(self.config, scale_search="activation", calibration="self")
        weight = self.weights[item.name if isinstance(item, ExpertsTarget) else item[0].name]
        if weight is None:
            return replace(config, scale_search=_UNWEIGHTED, calibration=None), None, ("not reached by calibration: unweighted scales",)
        return config, weight, ()


def choose(model: nn.Module, plan: QuantizationPlan, config: NVFP4Config, device: torch.device | None = None, *, strict: bool, progress: bool) -> ScaleChoice:
    """Measure what ``config`` needs and resolve ``"auto"``. Changes nothing.

    Args:
        device: where quantized layers go; None: where the dense ones are.

    Raises:
        CalibrationError, NonFiniteError: see :func:`statistics`; never for ``"auto"`` without calibration, which then
            takes ``"four_over_six"`` and says why in its note.
    """
    if config.scale_search == "auto":
        if config.calibration is None:
            return _automatic(model, plan, config, progress)
        config = replace(config, scale_search="activation")
    if config.scale_search == "gptq":
        return _gptq(model, plan, config, device, strict, progress)
    if config.scale_search != "activation":
        return ScaleChoice(config)
    batches: Any = self_calibration.write(model) if config.calibration == "self" else config.calibration
    rounds = config.prefill == "nvfp4"
    if rounds:
        batches = list(batches_of(batches))  # read twice
    means = statistics(model, plan.targets, batches, strict=strict and config.calibration != "self", progress=progress, experts=plan.experts)
    return ScaleChoice(config, _by_group(plan, means), head_inputs=_head_inputs(plan, means), probe=Probe(model, batches) if rounds else None)


def _gptq(model: nn.Module, plan: QuantizationPlan, config: NVFP4Config, device: torch.device | None, strict: bool, progress: bool) -> ScaleChoice:
    shared: dict[str, Tensor] = {}
    for family in planned(model, plan) if config.siblings == "shared" else ():
        shared |= dict.fromkeys((t.name for t in family), shared_global_scale(family, _UNWEIGHTED))
    found = gptq.prepare(model, plan, config, device, shared, strict=strict and config.calibration not in (None, "self"), progress=progress)
    return ScaleChoice(
        config,
        _by_group(plan, found.means),
        notes=found.notes,
        head_inputs=_head_inputs(plan, found.means),
        probe=Probe(model, found.batches) if config.prefill == "nvfp4" else None,
        ready=found.layers,
        experts=found.experts,
        global_scales=shared,
    )


def _head_inputs(plan: QuantizationPlan, means: dict[str, Any]) -> dict[str, Any]:
    return {t.name: x for t in plan.targets if t.head and (x := means[t.name].inputs()) is not None}


def _automatic(model: nn.Module, plan: QuantizationPlan, config: NVFP4Config, progress: bool) -> ScaleChoice:
    reason = self_calibration.why_not(model)
    if reason is None:
        try:
            chosen = choose(model, plan, replace(config, scale_search="activation", calibration="self"), strict=False, progress=progress)
        except (CalibrationError, NonFiniteError) as error:
            reason = str(error).splitlines()[0]
        else:
            tokens = self_calibration.SEQUENCES * self_calibration.TOKENS
            chosen.notes = [f'scale_search="auto": "activation" over {tokens} tokens that the model wrote itself']
            return chosen
    return ScaleChoice(replace(config, scale_search=_NO_DATA), notes=[f'scale_search="auto": "{_NO_DATA}", because {reason}'])


def _by_group(plan: QuantizationPlan, means: dict[str, Any]) -> dict[str, Any]:
    """Layers that share one weight see different inputs: the weight is judged by the mean of those that were reached."""
    found = {name: m.result() for name, m in means.items()}
    for group in plan.groups:
        reached = [w for t in group if (w := found[t.name]) is not None]
        found[group[0].name] = torch.stack([w.to(reached[0].device) for w in reached]).mean(0) if reached else None
    return found
