"""Which scale search each weight of one model gets, and the channel weights it needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import NVFP4Config, ScaleSearch, weight_only
from ..errors import CalibrationError, NonFiniteError
from ..modules import FP4Linear
from . import gptq, output_moments, self_calibration, token_weights
from .calibrate import batches_of, statistics
from .convert import dense_weight, experts_module, moved, quantize_expert_weight, rows_to_pad, share, unpadded
from .finished import LayerStore
from .layer_shares import Beside, shares_of
from .plan import ExpertsTarget, QuantizationPlan, Target, weight_count
from .probe import Probe
from .siblings import planned, shared_global_scale
from .sparsify_experts import PrunedExperts, weight_name
from .substitute import Value, substituted

_UNWEIGHTED: ScaleSearch = "mse"  # the same sweep as "activation", without data
SECONDS = 120.0  # that "auto" takes for "gptq" at most, by the figures below: who asks for nothing waits for a first token
_CPU_SECONDS, _CPU_SECONDS_SHORT = 6.3e-6, 2.2e-6  # a weight, on one core: SmolLM2-135M (106 M of them) took 336 s on two, with less text 112 to 117 s
# The text, a weight of a linear layer and one of an expert, on an H100: benchmarks/results/quality_time.csv. Of a linear layer's weights 1.2 times what an H200
# took for Qwen3-8B's size, as before.
_GPU_TEXT, _GPU_SECONDS, _GPU_SECONDS_EXPERTS = 20.0, 1.9e-8, 2.2e-8
_GPU_SECONDS_SHORT = 1.4e-8  # of a linear layer whose rows are rounded one by one: 1.2 times what an H100 took; an H200 took 85 s for Qwen3-8B's size
# Bytes of GPU memory beside the model: float64 matrices of the widest layer's Hessian, its factors and inverse, or of the moments of most outputs; activations,
# logits of a batch, and what else a block's layers have. 7.3e9 for Qwen3-8B's size, 12,288 channels, by adding up what is held; not measured on a GPU.
_MATRICES, _WORKING = 4, 2.5e9
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
        predicted_kl: by the name of the report's row: KL that this layer alone causes, where it could be predicted.
        kl, sweep_kl: for ``"gptq"``: KL from the dense model on text of its own that was held out, and that of ``"activation"`` there.
    """

    config: NVFP4Config
    weights: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    head_inputs: dict[str, Any] = field(default_factory=dict)
    probe: Probe | None = None
    ready: dict[str, tuple[FP4Linear, float]] = field(default_factory=dict)
    experts: dict[str, list[PrunedExperts]] = field(default_factory=dict)
    global_scales: dict[str, Tensor] = field(default_factory=dict)
    predicted_kl: dict[str, float] = field(default_factory=dict)
    kl: float | None = None
    sweep_kl: float | None = None

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


def choose(
    model: nn.Module,
    plan: QuantizationPlan,
    config: NVFP4Config,
    device: torch.device | None = None,
    *,
    strict: bool,
    progress: bool,
    store: LayerStore | None = None,
) -> ScaleChoice:
    """Measure what ``config`` needs and resolve ``"auto"``. Changes nothing.

    Args:
        device: where quantized layers go; None: where the dense ones are.
        store: where "gptq" keeps each finished layer; the notes say if something else was taken.

    Raises:
        CheckpointError: ``store`` holds another run's layers, or cannot be written to.
        CalibrationError, NonFiniteError: see :func:`statistics`; never for ``"auto"`` without calibration, which then
            takes what needs less, ``"four_over_six"`` at last, and says why in its note.
    """
    if config.scale_search == "auto":
        found = _automatic(model, plan, config, device, strict, progress, store)
        if store is not None and found.config.scale_search != "gptq":
            found.notes.append(f'checkpoint_dir={store.place!r} is for "gptq": nothing of it is in the result')
        return found
    if config.scale_search == "gptq":
        return _gptq(model, plan, config, device, strict, progress, store)
    if config.scale_search != "activation":
        return ScaleChoice(config)
    batches: Any = self_calibration.write(model) if config.calibration == "self" else config.calibration
    rounds = config.prefill == "nvfp4"
    if rounds:
        batches = list(batches_of(batches))  # read twice
    means = statistics(model, plan.targets, batches, strict=strict and config.calibration != "self", progress=progress, experts=plan.experts)
    return ScaleChoice(config, _by_group(plan, means), head_inputs=_head_inputs(plan, means), probe=Probe(model, batches) if rounds else None)


def _gptq(
    model: nn.Module,
    plan: QuantizationPlan,
    config: NVFP4Config,
    device: torch.device | None,
    strict: bool,
    progress: bool,
    store: LayerStore | None,
    form: gptq.Form | None = None,
) -> ScaleChoice:
    shared: dict[str, Tensor] = {}
    for family in planned(model, plan) if config.siblings == "shared" else ():
        shared |= dict.fromkeys((t.name for t in family), shared_global_scale(family, _UNWEIGHTED))
    strict = strict and config.calibration not in (None, "self")
    found = gptq.prepare(model, plan, config, device, shared, strict=strict, progress=progress, store=store, form=form)
    choice = ScaleChoice(
        config,
        _by_group(plan, found.means),
        notes=found.notes,
        head_inputs=_head_inputs(plan, found.means),
        probe=Probe(model, found.batches) if config.prefill == "nvfp4" else None,
        ready=found.layers,
        experts=found.experts,
        global_scales=shared,
    )
    both = _kl(model, plan, choice, found.probe)
    if both is None or found.probe is None:
        choice.notes.append("KL from the dense model was not measured: the model has no logits, or writes no text to measure on")
    else:
        choice.kl, choice.sweep_kl = both
        text = f"{found.probe.positions} tokens of its own text that were held out"
        choice.notes.append(f'KL from the dense model on {text}: {both[0]:.4f} nats a token, by "activation" {both[1]:.4f}')
        choice.predicted_kl = _predicted(model, plan, choice, found.probe, progress)
    return choice


def _head_inputs(plan: QuantizationPlan, means: dict[str, Any]) -> dict[str, Any]:
    return {t.name: x for t in plan.targets if t.head and (x := means[t.name].inputs()) is not None}


def _automatic(
    model: nn.Module, plan: QuantizationPlan, config: NVFP4Config, device: torch.device | None, strict: bool, progress: bool, store: LayerStore | None
) -> ScaleChoice:
    """The best that fits: "gptq", a shorter form of it, "activation", what needs no data."""
    given = config.calibration is not None and config.calibration != "self"
    if given:
        config = replace(config, calibration=list(batches_of(config.calibration)))  # perhaps read twice
    no_gptq = all_of_it = _no_gptq(model, plan)
    if short := no_gptq is not None:
        no_gptq = _no_gptq(model, plan, short)
    if no_gptq is None:
        form = gptq.form_of(model, short_on=_device_of(plan) if short else None)
        try:
            found = _gptq(model, plan, replace(config, scale_search="gptq"), device, strict, progress, store, form)
        except (CalibrationError, NonFiniteError) as error:
            no_gptq = str(error).splitlines()[0]
        except torch.OutOfMemoryError as error:  # nothing was changed, and a sweep over scales needs little
            no_gptq = f"it ran out of GPU memory ({str(error).splitlines()[0]})"
        else:
            if short:
                less = "less text than it takes by itself, with which" if form.together else "rows one by one, for together"
                found.notes.append(f'scale_search="auto": "gptq" with {less} {all_of_it}')
            return _measured_best(found)
    reason = None if given else self_calibration.why_not(model)
    if reason is None:
        try:
            own: Any = replace(config, scale_search="activation", calibration=config.calibration if given else "self")
            chosen = choose(model, plan, own, device, strict=strict and given, progress=progress)
        except (CalibrationError, NonFiniteError) as error:
            if given:
                raise
            reason = str(error).splitlines()[0]
        else:
            tokens = self_calibration.SEQUENCES * self_calibration.TOKENS
            text = "the calibration batches" if given else f"{tokens} tokens that the model wrote itself"
            chosen.notes = [f'scale_search="auto": "activation" over {text}; not "gptq", because {no_gptq}']
            return chosen
    return ScaleChoice(replace(config, scale_search=_NO_DATA, calibration=None), notes=[f'scale_search="auto": "{_NO_DATA}", because {reason}'])


def _measured_best(found: ScaleChoice) -> ScaleChoice:
    """``found`` of "gptq", or "activation" over the same text if its KL divergence is lower."""
    first, *notes = found.notes
    found.notes = [first.replace('scale_search="gptq"', 'scale_search="auto": "gptq"', 1), *notes]
    if found.kl is None or found.sweep_kl is None or found.kl <= found.sweep_kl:
        return found
    config = replace(found.config, scale_search="activation", calibration="self")
    lower = f'"activation" over the same text: lower KL ({found.sweep_kl:.4f} against {found.kl:.4f})'
    return replace(found, config=config, ready={}, experts={}, predicted_kl={}, kl=found.sweep_kl, notes=[*found.notes, f'scale_search="auto": {lower}'])


def _device_of(plan: QuantizationPlan) -> torch.device:
    modules = [*(g[0].module for g in plan.groups), *(e.module for e in plan.experts)]
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))


def _no_gptq(model: nn.Module, plan: QuantizationPlan, short: bool = False) -> str | None:
    """Why "auto" does not take "gptq", or what takes less time (``short``), in words; None if it is worth trying."""
    reason = token_weights.why_not(model) or self_calibration.why_not(model)
    if reason is not None:
        return reason
    first = [g[0] for g in plan.groups]
    layers, experts = sum(map(weight_count, first)), sum(map(weight_count, plan.experts))
    device = _device_of(plan)
    if device.type == "cpu":
        seconds = (layers + experts) * (_CPU_SECONDS_SHORT if short else _CPU_SECONDS) / torch.get_num_threads()
    else:
        seconds = _GPU_TEXT + layers * (_GPU_SECONDS_SHORT if short else _GPU_SECONDS) + experts * _GPU_SECONDS_EXPERTS
    if seconds > SECONDS:
        return f"it would take about {seconds:.0f} s (limit {SECONDS:.0f} s)"
    if device.type == "cuda":
        shapes = [dense_weight(t).shape for t in first]
        inputs = max((k for _, k in shapes), default=0)
        outputs = 0 if short else max((n for (n, _), t in zip(shapes, first, strict=True) if gptq.has_output_moments(t)), default=0)
        sketches = 0.0 if short else output_moments.room(model)  # in the host's memory before the first matrix is made
        need, free = max(8 * _MATRICES * max(inputs, outputs) ** 2, sketches) + _WORKING, torch.cuda.mem_get_info(device)[0]
        if need > free:
            return f"it would take about {need / 1e9:.1f} GB of GPU memory beside the model, of which {free / 1e9:.1f} GB are free"
    return None


def _kl(model: nn.Module, plan: QuantizationPlan, choice: ScaleChoice, probe: Probe | None) -> tuple[float, float] | None:
    """``(KL from the dense model of what "gptq" made, of what "activation" makes of the same layers)`` in nats a token; heads are left out."""
    if probe is None:
        return None
    ready: dict[tuple[nn.Module, str], Value] = {}
    sweep: dict[tuple[nn.Module, str], Value] = {}
    for group in (g for g in plan.groups if not g[0].head):
        name = group[0].name
        layer = choice.ready[name][0] if name in choice.ready else None
        for t in group:
            sweep[t.module, "weight"] = partial(_swept_layer, choice, group, t)
            ready[t.module, "weight"] = sweep[t.module, "weight"] if layer is None else partial(_in_layout, layer, t)
    for e in plan.experts:
        both = {p.attribute: p for p in choice.experts.get(e.name, [])}
        for attribute in e.spec.parameters[:2]:
            sweep[e.module, attribute] = partial(_swept_experts, choice, e, attribute)
            ready[e.module, attribute] = both[attribute].dense if attribute in both else sweep[e.module, attribute]
    found = []
    for values in (ready, sweep):
        with substituted(values):
            found.append(probe.kl(model))
    return found[0], found[1]


def _predicted(model: nn.Module, plan: QuantizationPlan, choice: ScaleChoice, probe: Probe, progress: bool) -> dict[str, float]:
    """KL in nats a token that each weight of the report alone causes, over the text of ``probe``; heads are left out."""
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
    rows: dict[str, str] = {}
    for group in (g for g in plan.groups if not g[0].head):
        layer = choice.ready[group[0].name][0] if group[0].name in choice.ready else _swept(choice, group)
        for t in group:
            own = share(layer)
            bias = t.module._parameters.get("bias")
            own.bias = None if bias is None else bias.detach().to(own.scale.device)
            pairs[t.name], rows[t.name] = (Beside(own), t.module), t.name
    for e in plan.experts:
        both = {p.attribute: p for p in choice.experts.get(e.name, [])}
        if both:
            experts = experts_module(e, {a: p.weight for a, p in both.items()}, {a: p.pad for a, p in both.items()}, weight_only(choice.config.prefill))
            pairs[e.name], rows[e.name] = (Beside(experts), e.module), weight_name(e, e.spec.first)
    windows = [b["input_ids"] for b in probe.batches]
    shares, notes = shares_of(pairs, model, torch.cat(windows), progress=progress)
    choice.notes += notes
    return {rows[s.name]: s.kl for s in shares}


def _in_layout(layer: FP4Linear, target: Target) -> Tensor:
    with moved(layer, next(target.module.parameters()).device):
        w = layer.dequantize()
    return w.t() if target.transposed else w


def _swept_layer(choice: ScaleChoice, group: list[Target], target: Target) -> Tensor:
    return _in_layout(_swept(choice, group), target)


def _swept(choice: ScaleChoice, group: list[Target]) -> FP4Linear:
    config, weight, _ = choice.of(group)
    return FP4Linear.from_weight(dense_weight(group[0]), scale_search=config.scale_search, channel_weight=_on(weight, group[0].module))


def _swept_experts(choice: ScaleChoice, target: ExpertsTarget, attribute: str) -> Tensor:
    config, statistics, _ = choice.of(target)
    weight = None if statistics is None else statistics.first if attribute == target.spec.first else statistics.down
    pad = rows_to_pad(target)[attribute]
    packed, _ = quantize_expert_weight(target, target.stack(attribute).detach(), config, pad, _on(weight, target.module))
    w = unpadded(packed.dequantize(), packed.columns, pad)
    return w.mT if target.spec.transposed else w


def _on(weight: Tensor | None, module: nn.Module) -> Tensor | None:
    return None if weight is None else weight.to(next(module.parameters()).device)


def _by_group(plan: QuantizationPlan, means: dict[str, Any]) -> dict[str, Any]:
    """Layers that share one weight see different inputs: the weight is judged by the mean of those that were reached."""
    found = {name: m.result() for name, m in means.items()}
    for group in plan.groups:
        reached = [w for t in group if (w := found[t.name]) is not None]
        found[group[0].name] = torch.stack([w.to(reached[0].device) for w in reached]).mean(0) if reached else None
    return found
