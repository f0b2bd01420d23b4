"""A model to 2:4-sparse NVFP4, or to a mixture of sparse and dense NVFP4: which layers, which weights, at what cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Sparse24Config
from ..errors import CalibrationError, ConfigError, QualityWarning, SparsityError, bullets
from ..formats import pruning, sparse24
from ..modules import FP4Linear, Sparse24Linear
from .calibrate import batches_of, statistics
from .chain import Chain, find_chain, recording
from .choose import Candidate, choose
from .convert import dense_weight, install_group, relative_error
from .coverage import LayerReport
from .hessian import Moments
from .plan import Names, Plan, Target
from .probe import Probe
from .progress import bar
from .walk import Group, walk

_PRUNERS: dict[str, Callable] = {"wanda": pruning.wanda, "sparsegpt": pruning.sparsegpt, "admm": pruning.admm}
_SEQUENTIAL = ("sparsegpt", "admm")
_HELD_BACK = 8  # one batch in so many is kept from calibration, to measure on
_WANDA_ROWS = 128
_LOUD_KL = 0.15  # nats a token: half as much again as calibrated NVFP4 costs SmolLM2-135M
_LOUD_WEIGHTS = 0.2  # without calibration: share of a weight's norm that is lost; NVFP4 loses 0.09


@dataclass
class Data:
    """What calibration gives. ``held_back``: the probe's batches were not calibrated on."""

    batches: list[Any] = field(default_factory=list)
    chain: Chain = field(default_factory=lambda: Chain([], broken="no calibration"))
    probe: Probe | None = None
    held_back: bool = False
    mean_squares: dict[str, Tensor | None] = field(default_factory=dict)


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
        if kl is not None and kl > _LOUD_KL:
            found.append(
                f"these weights cost {kl:.2f} nats a token against the dense model (perplexity about x{math.exp(kl):.1f} on such text, more on other text): "
                + _advice(self.config, bool(sparse))
            )
        elif kl is None and self.config.pruning != "existing" and sparse:
            lost = max(sparse, key=lambda i: i.relative_error or 0.0)
            if (lost.relative_error or 0.0) > _LOUD_WEIGHTS:
                found.append(
                    f"one-shot pruning, its cost not measured (no calibration data, or no logits): {lost.name} lost {lost.relative_error:.0%} of its norm. "
                    f'Small dense models became useless this way (SmolLM2-135M, pruning="magnitude": perplexity 16 -> 1,806); {_advice(self.config, True)}'
                )
        if kl is not None and self.config.max_kl is not None and kl > self.config.max_kl:
            found.append(f"KL is {kl:.4f}, above max_kl={self.config.max_kl}: pruning the chosen layers together cost more than predicted")
        for text in found:
            warnings.warn(text, QualityWarning, stacklevel=4)
        return found


def sparsify(model: nn.Module, plan: Plan, config: Sparse24Config, device: torch.device | None, strict: bool, progress: bool) -> Outcome:
    """Replace the layers of ``plan``, which has passed its preflight. Everything that can be refused is refused before the first is changed."""
    names = Names(config.layers, "layers") if config.layers is not None else None
    allowed = {g[0].name for g in plan.groups if names is None or any(names.reason(t.names, t.module, None) for t in g)}
    if names is not None and (names.unused() or not allowed):
        raise ConfigError(
            "layers names what is not there",
            value=", ".join(names.unused()) or "[]",
            limit="names of layers to be quantized",
            remedy="report(model) lists them.",
        )
    if config.pruning == "existing":
        _check_existing([g for g in plan.groups if g[0].name in allowed])
    data = _calibrate(model, plan, config, strict, progress)
    sparse = allowed
    if config.budget:
        found = candidates(model, plan, config, data, allowed, progress)
        dense = [Candidate(g, _dense_layer(g[0], config, None, None, _square(data, g))) for g in plan.groups]
        sparse = choose(found, dense, config, data.probe, model, data.chain, progress)
    notes = (
        [f"one decoder block at a time was not possible ({data.chain.broken}): whole-model passes"] if config.pruning in _PRUNERS and data.chain.broken else []
    )
    if data.probe is not None and not data.held_back:
        notes.append("KL was measured on batches that were also calibrated on: give four batches or more")
    model, rows = _replace(model, plan, config, data, sparse, device, progress)
    return Outcome(model, rows, notes, config, data.probe)


def _check_existing(groups: list[Group]) -> None:
    bad = [(g[0].name, dense_weight(g[0])) for g in groups if not _is_24(dense_weight(g[0]))]
    if bad:
        shown = bullets([f"{name} {list(w.shape)}" for name, w in bad])
        raise SparsityError(
            f'{len(bad)} of {len(groups)} layers are not 2:4, which pruning="existing" needs; nothing was changed:\n{shown}\n',
            value=f"{len(bad)} dense layers",
            limit="at most two non-zeros in every four consecutive weights of a row",
            remedy='Name the 2:4 layers in layers=[...] (the others become dense NVFP4), or prune: pruning="sparsegpt" with calibration data.',
        )


def _is_24(w: Tensor) -> bool:
    return sparse24.is_24(nn.functional.pad(w, (0, -w.shape[1] % 4)))


def _calibrate(model: nn.Module, plan: Plan, config: Sparse24Config, strict: bool, progress: bool) -> Data:
    """One pass of the dense model over the batches: proves them, records the chain, keeps what the probe compares with."""
    if config.calibration is None:
        return Data()
    batches = list(batches_of(config.calibration))
    count = math.ceil(len(batches) / _HELD_BACK) if len(batches) >= 4 else 0
    used, held = (batches[:-count], batches[-count:]) if count else (batches, batches[-1:])
    chain = find_chain(model, plan.targets) if config.pruning in _PRUNERS else Chain([], broken=f'pruning="{config.pruning}" needs none')
    with recording(chain):
        found = statistics(model, plan.targets, used, strict=strict, progress=progress)
    if config.pruning in _PRUNERS:
        _check_long_enough(plan, config, {name: m.rows for name, m in found.items()})
    probe = Probe(model, held)
    if config.max_kl is not None and not probe.usable:
        raise ConfigError(
            "max_kl needs a model with logits", value="none in its output", limit="output.logits", remedy="Use bits=... or max_error=... for this model."
        )
    return Data(used, chain, probe, count > 0, {name: m.result() for name, m in found.items()})


def _check_long_enough(plan: Plan, config: Sparse24Config, rows: dict[str, int]) -> None:
    """Fewer rows than channels leave directions of the input about which a solver knows nothing."""
    short = []
    for t in plan.targets:
        k = dense_weight(t).shape[1]
        need = k if config.pruning in _SEQUENTIAL else _WANDA_ROWS
        if 0 < rows[t.name] < need:
            short.append((need, rows[t.name], t.name))
    if short:
        need, got, name = max(short)
        raise CalibrationError(
            f'calibration is too short for pruning="{config.pruning}"; nothing was changed',
            value=f"{got} rows for {name} ({len(short)} layers are short)",
            limit=f">= {need} rows",
            remedy="A few thousand tokens are the least that helps; SmolLM2-135M was pruned with 16,384.",
        )


# --- one weight ---------------------------------------------------------------------------------------------------


def _sparse_layer(target: Target, config: Sparse24Config, device: torch.device | None, moments: Moments | None, square: Tensor | None) -> FP4Linear:
    w = _on(dense_weight(target), device)
    square = None if square is None else square.to(w.device)
    if config.pruning in _PRUNERS and moments is not None and (hessian := moments.mean()) is not None:
        layer = Sparse24Linear(w.shape[1], w.shape[0], dtype=w.dtype, device="meta", large_m=config.large_m)
        pad = (0, layer.padding)
        wanted = nn.functional.pad(moments.target(w) if config.pruning in _SEQUENTIAL else w.float(), pad)
        layer.take(_PRUNERS[config.pruning](wanted, nn.functional.pad(hessian.to(w.device), pad + pad), config.search))
        return layer
    mask = None
    if config.pruning != "existing":
        mask = sparse24.mask_of_scores(nn.functional.pad(w.abs(), (0, -w.shape[1] % 4)))[:, : w.shape[1]]
    return Sparse24Linear.from_weight(w, mask=mask, scale_search=_search(config, square), channel_weight=square, large_m=config.large_m)


def _dense_layer(target: Target, config: Sparse24Config, device: torch.device | None, moments: Moments | None, square: Tensor | None) -> FP4Linear:
    w = _on(dense_weight(target), device)
    square = None if square is None else square.to(w.device)
    if moments is not None and moments.rows:
        square = moments.mean().diagonal().to(w.device)  # type: ignore[union-attr]
        w = moments.target(w).to(w.dtype)
    return FP4Linear.from_weight(w, scale_search=_search(config, square), channel_weight=square, large_m=config.large_m)


def _search(config: Sparse24Config, square: Tensor | None) -> str:
    return "mse" if config.search == "activation" and square is None else config.search


def _on(w: Tensor, device: torch.device | None) -> Tensor:
    return w if device is None else w.to(device)


def _moments_on(moments: Moments, device: torch.device | None) -> Moments:
    if device is None:
        return moments
    return replace(moments, **{name: t.to(device) for name in ("hessian", "cross") if (t := getattr(moments, name)) is not None})


# --- all of them --------------------------------------------------------------------------------------------------


def candidates(model: nn.Module, plan: Plan, config: Sparse24Config, data: Data, allowed: set[str], progress: bool) -> list[Candidate]:
    """What each layer would be on its own, sparse, with the dense model around it."""
    groups = [g for g in plan.groups if g[0].name in allowed]
    out = []
    if config.pruning in _PRUNERS:
        visits = walk(model, data.chain, groups, data.batches, sequential=False, progress=progress, desc="prune (to choose)")
    else:
        visits = (("", g, Moments()) for g in groups)
    for _, group, moments in visits:
        w = dense_weight(group[0])
        square = _square(data, group)
        hessian = moments.mean()
        layer = _sparse_layer(group[0], config, None, moments, square)
        q = layer.dequantize(torch.float32)
        error = pruning.output_error(w, q, torch.diag(square).to(w.device) if hessian is None and square is not None else hessian)
        out.append(Candidate(group, layer, error))
    return out


def _replace(model: nn.Module, plan: Plan, config: Sparse24Config, data: Data, sparse: set[str], device: torch.device | None, progress: bool):
    needs_moments = config.pruning in _PRUNERS and bool(sparse)
    sequential = config.pruning in _SEQUENTIAL
    if needs_moments:
        visits = walk(model, data.chain, plan.groups, data.batches, sequential=sequential, progress=progress, desc="prune")
    else:
        visits = (("", g, Moments()) for g in bar(plan.groups, "quantize", "layer", progress))
    rows: list[LayerReport] = []
    pending: list[tuple[Group, FP4Linear, float, float | None, tuple[str, ...]]] = []
    here = None
    for place, group, moments in visits:
        if place != here or not needs_moments:
            model = _install(model, pending, rows)
            here = place
        moments = _moments_on(moments, device)
        square = _square(data, group)
        unknown = config.pruning in _PRUNERS and square is None
        make = _sparse_layer if group[0].name in sparse and not unknown else _dense_layer
        layer = make(group[0], config, device, moments, square)
        w = _on(dense_weight(group[0]), device)
        hessian = moments.mean()
        error = relative_error(w, layer)
        output = None
        if hessian is not None:
            output = pruning.output_error(w, layer.dequantize(torch.float32), hessian)
        pending.append((group, layer, error, output, ("not reached by calibration: dense, unweighted scales",) if unknown else ()))
        if needs_moments and sequential:
            # The rest of the block is calibrated behind this layer. Its module stays until then: replays of the block need no FP4 kernels.
            parameter = group[0].module.get_parameter("weight")
            q = layer.dequantize(parameter.dtype).to(parameter.device)
            parameter.data = q.t() if group[0].transposed else q
    return _install(model, pending, rows), rows


def _install(model: nn.Module, pending: list, rows: list[LayerReport]) -> nn.Module:
    for group, layer, error, output, notes in pending:
        model, found = install_group(model, group, layer, error)
        rows += [replace(row, output_error=output, notes=(*row.notes, *notes)) for row in found]
    pending.clear()
    return model


def _square(data: Data, group: Group) -> Tensor | None:
    """E[x^2] per channel over all layers of the group."""
    reached = [s for t in group if (s := data.mean_squares.get(t.name)) is not None]
    return torch.stack([s.to(reached[0].device) for s in reached]).mean(0) if reached else None


def _advice(config: Sparse24Config, sparse: bool) -> str:
    if not sparse:
        return "look at the report's largest errors."
    better = "" if config.pruning in _SEQUENTIAL else 'use pruning="sparsegpt" or "admm"; '
    return f"{better}prune fewer layers (max_kl=..., bits=...), or train what is left (examples/recover_sparse.py)."
