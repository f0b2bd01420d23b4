"""A model to 2:4-sparse NVFP4, or to a mixture of sparse and dense NVFP4: which layers, which weights, at what cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Sparse24Config
from ..errors import CalibrationError, ConfigError, QualityWarning, SparsityError, bullet_names
from ..formats import sparse24
from ..formats.hessian import output_error
from ..modules import FP4Linear
from .calibrate import batches_of, statistics
from .calibrate_experts import ExpertsMeans, Statistics
from .chain import Chain, find_chain, recording
from .choose import Candidate, choose
from .convert import dense_weight, install_group
from .coverage import LayerReport
from .hessian import Moments
from .plan import ExpertsTarget, Names, QuantizationPlan
from .probe import LOUD_KL, Probe
from .progress import bar
from .prune import ENOUGH, PRUNERS, SEQUENTIAL, dense_layer, is_24, needs_inputs, rows_needed, sparse_layer
from .rounding_error import relative_error
from .routed import RoutedInputs
from .sparsify_experts import expert_weights, install_packed, not_24, put_dense, quantize_experts
from .token_weights import TokenWeights, described_weights, fisher
from .walk import Group, Item, walk

_HELD_BACK = 8  # one batch in so many is kept from calibration, to measure on
_LOUD_WEIGHTS = 0.2  # without calibration: share of a weight's norm that is lost; NVFP4 loses 0.09


@dataclass
class Data:
    """What calibration gives. ``held_back``: the probe's batches were not calibrated on. ``weights`` of its tokens, for ``scale_search="gptq"``."""

    batches: list[Any] = field(default_factory=list)
    chain: Chain = field(default_factory=lambda: Chain([], broken="no calibration"))
    probe: Probe | None = None
    held_back: bool = False
    mean_squares: dict[str, Tensor | None] = field(default_factory=dict)
    experts: dict[str, Statistics | None] = field(default_factory=dict)
    weights: TokenWeights | None = None


@dataclass
class Outcome:
    """``model``: the one given, or the layer that replaced it. The rest is for the report."""

    model: nn.Module
    layers: list[LayerReport]
    notes: list[str]
    config: Sparse24Config
    probe: Probe | None

    def measure(self, model: nn.Module) -> float | None:
        """KL from the dense model; None without calibration or logits."""
        return self.probe.kl(model) if self.probe is not None and self.probe.usable else None

    def verdict(self, kl: float | None) -> list[str]:
        """Warnings for the report, each also issued as a QualityWarning."""
        sparse = [i for i in self.layers if i.format == sparse24.NAME]
        found = []
        if kl is not None and kl > LOUD_KL:
            found.append(
                f"these weights cost {kl:.2f} nats a token against the dense model (perplexity about x{math.exp(kl):.1f} on such text, more on other text): "
                + _advice(self.config, bool(sparse))
            )
        elif kl is None and self.config.pruning != "existing" and sparse:
            lost = max(sparse, key=lambda i: i.relative_error or 0.0)
            if (lost.relative_error or 0.0) > _LOUD_WEIGHTS:
                found.append(
                    f"one-shot pruning, its cost not measured (no calibration data, or no logits): {lost.name} lost {lost.relative_error:.0%} of its norm. "
                    f'Small dense models became useless this way (SmolLM2-135M, pruning="magnitude": perplexity 15 -> 2,225); {_advice(self.config, True)}'
                )
        if kl is not None and self.config.max_kl is not None and kl > self.config.max_kl:
            found.append(f"KL is {kl:.4f}, above max_kl={self.config.max_kl}: pruning the chosen layers together cost more than predicted")
        for text in found:
            warnings.warn(text, QualityWarning, stacklevel=5)
        return found


def sparsify(model: nn.Module, plan: QuantizationPlan, config: Sparse24Config, device: torch.device | None, strict: bool, progress: bool) -> Outcome:
    """Replace the layers and experts of ``plan``, which has passed its preflight.

    Everything that can be refused is refused before the first is changed.
    """
    names = Names(config.layers, "layers") if config.layers is not None else None
    allowed = {g[0].name for g in plan.groups if names is None or any(names.reason(t.names, t.module, None) for t in g)}
    for e in plan.experts:
        every = [tuple(f"{n}.{a}" if n else a for n in e.names) for a in e.spec.parameters[:2]]
        allowed |= {paths[0] for paths in every if names is None or names.reason(paths, e.module, None)}
    if names is not None and (names.unused() or not allowed):
        raise ConfigError(
            "layers names what is not there",
            value=", ".join(names.unused()) or "[]",
            limit="names of layers to be quantized",
            remedy="report(model) lists them.",
        )
    if config.pruning == "existing":
        _check_existing(plan, allowed)
    data = _calibrate(model, plan, config, strict, progress)
    sparse = allowed
    if config.budget:
        found = candidates(model, plan, config, data, allowed, progress)
        dense = [_candidate(g, dense_layer(dense_weight(g[0]), config, None, _square(data, g))) for g in plan.groups]
        dense += [p.candidate() for e in plan.experts for p in quantize_experts(e, config, set(), None, None, data.experts.get(e.name))]
        sparse = choose(found, dense, config, data.probe, model, data.chain, progress)
    notes = [f"one decoder block at a time was not possible ({data.chain.broken}): whole-model passes"] if needs_inputs(config) and data.chain.broken else []
    if data.probe is not None and not data.held_back:
        notes.append("KL was measured on batches that were also calibrated on: give four batches or more")
    model, rows = _replace(model, plan, config, data, sparse, device, progress)
    notes += [f'scale_search="gptq" over the calibration batches, {described_weights(data.weights)}'] if data.weights is not None else []
    return Outcome(model, rows, notes, config, data.probe)


def _check_existing(plan: QuantizationPlan, allowed: set[str]) -> None:
    groups = [g for g in plan.groups if g[0].name in allowed]
    weights = [(e, name, p) for e in plan.experts for name, p in expert_weights(e).items() if name in allowed]
    bad = [(g[0].name, str(list(w.shape))) for g in groups if not is_24(w := dense_weight(g[0]))]
    bad += [(name, f"{list(p.shape)} ({count} of {p.shape[0]} experts)") for e, name, p in weights if (count := not_24(e, p))]
    if bad:
        shown = bullet_names(f"{name}: {what}" for name, what in bad)
        raise SparsityError(
            f'{len(bad)} of {len(groups) + len(weights)} layers are not 2:4, which pruning="existing" needs; nothing was changed:\n{shown}\n',
            value=f"{len(bad)} dense layers",
            limit="at most two non-zeros in every four consecutive weights of a row",
            remedy='Name the 2:4 layers in layers=[...] (the others become dense NVFP4), or prune: pruning="sparsegpt" with calibration data.',
        )


def _calibrate(model: nn.Module, plan: QuantizationPlan, config: Sparse24Config, strict: bool, progress: bool) -> Data:
    """One pass of the dense model over the batches: proves them, records the chain, keeps what the probe compares with."""
    if config.calibration is None:
        return Data()
    batches = list(batches_of(config.calibration))
    count = math.ceil(len(batches) / _HELD_BACK) if len(batches) >= 4 else 0
    used, held = (batches[:-count], batches[-count:]) if count else (batches, batches[-1:])
    chain = find_chain(model, [*plan.targets, *plan.experts]) if needs_inputs(config) else Chain([], broken=f'pruning="{config.pruning}" needs none')
    with recording(chain):
        found = statistics(model, plan.targets, used, strict=strict, progress=progress, experts=plan.experts)
    routed: dict[str, ExpertsMeans] = {e.name: found.pop(e.name) for e in plan.experts}
    if config.pruning in PRUNERS:
        _check_long_enough(plan, config, {name: m.rows for name, m in found.items()}, {name: m.seen for name, m in routed.items()})
    probe = Probe(model, held)
    if config.max_kl is not None and not probe.usable:
        raise ConfigError(
            "max_kl needs a model with logits", value="none in its output", limit="output.logits", remedy="Use bits=... or max_error=... for this model."
        )
    squares = {name: m.result() for name, m in found.items()}
    weights = fisher(model, plan.targets, used, chain, progress, plan.experts) if config.search == "gptq" else None
    return Data(used, chain, probe, count > 0, squares, {name: m.result() for name, m in routed.items()}, weights)


def _check_long_enough(plan: QuantizationPlan, config: Sparse24Config, rows: dict[str, int], seen: dict[str, int]) -> None:
    """``seen``: tokens of the modules of experts. What a single expert lacks is borrowed from the others of its layer."""
    wanted = [(dense_weight(t).shape[1], rows[t.name], t.name) for t in plan.targets]
    wanted += [(max(p.shape[-2 if e.spec.transposed else -1] for p in expert_weights(e).values()), seen[e.name], e.name) for e in plan.experts]
    short = [(need, got, name) for k, got, name in wanted if 0 < got < (need := rows_needed(config, k))]
    if short:
        need, got, name = max(short)
        raise CalibrationError(
            f'calibration is too short for pruning="{config.pruning}"; nothing was changed',
            value=f"{got} rows for {name} ({len(short)} layers are short)",
            limit=f">= {need} rows",
            remedy="A few thousand tokens are the least that helps; SmolLM2-135M was pruned with 16,384.",
        )


# --- the layers -----------------------------------------------------------------------------------------------------


def _on(w: Tensor, device: torch.device | None) -> Tensor:
    return w if device is None else w.to(device)


def _moments_on(moments: Moments, device: torch.device | None) -> Moments:
    if device is None:
        return moments
    return replace(moments, **{name: t.to(device) for name in ("hessian", "cross") if (t := getattr(moments, name)) is not None})


# --- all of them --------------------------------------------------------------------------------------------------


def candidates(model: nn.Module, plan: QuantizationPlan, config: Sparse24Config, data: Data, allowed: set[str], progress: bool) -> list[Candidate]:
    """What each layer would be on its own, sparse, with the dense model around it."""
    items: list[Item] = [g for g in plan.groups if g[0].name in allowed]
    items += [e for e in plan.experts if allowed & set(expert_weights(e))]
    out = []
    for _, item, found in _visits(model, data, items, needs_inputs(config), False, progress, "prune (to choose)"):
        if isinstance(item, ExpertsTarget):
            packed = quantize_experts(item, config, allowed, None, _routed(found), data.experts.get(item.name))
            out += [p.candidate() for p in packed if p.name in allowed]
            continue
        moments = _moments(found)
        w = dense_weight(item[0])
        square = _square(data, item)
        hessian = moments.mean()
        layer = sparse_layer(w, config, moments, square)
        q = layer.dequantize(torch.float32)
        error = output_error(w, q, torch.diag(square).to(w.device) if hessian is None and square is not None else hessian)
        out.append(_candidate(item, layer, error))
    return out


def _candidate(group: Group, layer: FP4Linear, error: float = 0.0) -> Candidate:
    target = group[0]
    return Candidate(
        target.name,
        target.module.get_parameter("weight"),
        lambda: layer.dequantize().t() if target.transposed else layer.dequantize(),
        error,
        alone=len(group) == 1,
    )


def _visits(model: nn.Module, data: Data, items: list[Item], needs_moments: bool, sequential: bool, progress: bool, desc: str) -> Iterable:
    """``(place, item, what is known of its inputs)``; see :func:`.walk.walk`. Nothing is measured where it is not needed."""
    if needs_moments:
        return walk(model, data.chain, items, data.batches, sequential=sequential, progress=progress, desc=desc, weigh=data.weights)
    return (("", item, None) for item in bar(items, desc, "layer", progress))


def _moments(found: Any) -> Moments:
    return found if isinstance(found, Moments) else Moments()


def _routed(found: Any) -> RoutedInputs | None:
    return found if isinstance(found, RoutedInputs) else None


def _replace(model: nn.Module, plan: QuantizationPlan, config: Sparse24Config, data: Data, sparse: set[str], device: torch.device | None, progress: bool):
    needs_moments = config.search == "gptq" or (config.pruning in PRUNERS and bool(sparse))
    sequential = config.pruning in SEQUENTIAL
    items: list[Item] = [*plan.groups, *plan.experts]
    rows: list[LayerReport] = []
    pending: list[Callable[[nn.Module], tuple[nn.Module, list[LayerReport]]]] = []
    here = None
    for place, item, found in _visits(model, data, items, needs_moments, sequential, progress, "prune" if needs_moments else "quantize"):
        if place != here or not needs_moments:
            model = _install(model, pending, rows)
            here = place
        if isinstance(item, ExpertsTarget):
            both = quantize_experts(item, config, sparse, device, _routed(found), data.experts.get(item.name), sequential)
            pending.append(partial(install_packed, both=both, prefill=config.prefill, device=device))
            if needs_moments and sequential:
                put_dense(both)
            continue
        group, moments = item, _moments_on(_moments(found), device)
        square = _square(data, group)
        unknown = config.pruning in PRUNERS and needs_moments and square is None
        make = sparse_layer if group[0].name in sparse and not unknown else dense_layer
        w = _on(dense_weight(group[0]), device)
        layer = make(w, config, moments, square)
        hessian = moments.mean()
        error = relative_error(w, layer)
        output = None
        if hessian is not None:
            output = output_error(w, layer.dequantize(torch.float32), hessian)
        notes: tuple[str, ...] = ("not reached by calibration: dense, unweighted scales",) if unknown else ()
        if config.search == "gptq" and 0 < moments.rows < ENOUGH:
            notes += (f'met {moments.rows} tokens, fewer than {ENOUGH}: "activation"',)
        pending.append(partial(_install_layer, group=group, layer=layer, error=error, output=output, notes=notes))
        if needs_moments and sequential:
            # The rest of the block is calibrated behind this layer. Its module stays until then: replays of the block need no FP4 kernels.
            parameter = group[0].module.get_parameter("weight")
            q = layer.dequantize(parameter.dtype).to(parameter.device)
            parameter.data = q.t() if group[0].transposed else q
    return _install(model, pending, rows), rows


def _install(model: nn.Module, pending: list, rows: list[LayerReport]) -> nn.Module:
    for install in pending:
        model, found = install(model)
        rows += found
    pending.clear()
    return model


def _install_layer(model: nn.Module, group: Group, layer: FP4Linear, error: float, output: float | None, notes: tuple[str, ...]):
    model, found = install_group(model, group, layer, error)
    return model, [replace(row, output_error=output, notes=(*row.notes, *notes)) for row in found]


def _square(data: Data, group: Group) -> Tensor | None:
    """E[x^2] per channel over all layers of the group."""
    reached = [s for t in group if (s := data.mean_squares.get(t.name)) is not None]
    return torch.stack([s.to(reached[0].device) for s in reached]).mean(0) if reached else None


def _advice(config: Sparse24Config, sparse: bool) -> str:
    if not sparse:
        return "look at the report's largest errors."
    better = "" if config.pruning in SEQUENTIAL else 'use pruning="sparsegpt" or "admm"; '
    return f"{better}prune fewer layers (max_kl=..., bits=...), or train what is left (fp4_inductor.recover)."
