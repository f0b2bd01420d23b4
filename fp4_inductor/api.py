"""The public functions that change, write and read whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .checkpoint import load, save
from .config import NVFP4Config
from .errors import ConfigError
from .models.calibrate import mean_squares
from .models.convert import convert_group
from .models.coverage import LayerReport, Report, record
from .models.plan import Plan, make_plan, model_bytes
from .models.preflight import check_device, preflight
from .models.progress import bar
from .models.siblings import annotated, planned, shared_global_scale
from .modules import FP4Linear, pack

__all__ = ["load", "quantize_model", "save"]


def quantize_model(
    model: nn.Module,
    config: NVFP4Config | None = None,
    *,
    ignore: Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    strict: bool = True,
) -> nn.Module:
    """Replace the linear layers of ``model`` by NVFP4 ones, in place, and print a report.

    ``nn.Linear`` (and subclasses that keep its forward) and transformers' ``Conv1D`` become :class:`FP4Linear`. Output
    heads, everything tied to an embedding, routers, convolutions and vision towers stay as they are, each with its
    reason in the report (``fp4_inductor.report(model)``). Linear layers that share one weight share the quantized one.
    Every layer is checked before the first is changed; then they are replaced one by one, each dense weight being
    released before the next is touched, so peak memory is the model plus one layer. Siblings (q/k/v, gate/up) become
    adjacent rows of one buffer, see :class:`NVFP4Config`.

    Args:
        model: any module, in bfloat16, float16 or float32. Quantize before ``torch.compile``.
        config: an :class:`NVFP4Config`; its defaults if None.
        ignore: layers to leave alone, besides the default list: names (``"model.layers.0"`` takes all below it), last
            components (``"lm_head"``, ``"mlp.down_proj"``), or ``"re:..."`` matched from the start of the name.
        filter_fn: ``filter_fn(module, name) -> bool``; False leaves the module alone.
        device: quantize on this device and leave the whole model there. Each layer moves when its turn comes, so the
            dense model never has to fit there. None: every layer is quantized where it is.
        progress: show progress bars and print the report.
        strict: raise if a linear or expert weight outside the skip list cannot be quantized. False keeps such weights
            in high precision; the report's coverage says how much that is.

    Returns:
        ``model`` (a new :class:`FP4Linear` if ``model`` itself is a linear layer).

    Raises:
        CoverageError, NonFiniteError, DTypeError, ShapeError, DeviceError, ConfigError, PreflightError, CalibrationError:
            before anything was changed; the message lists every layer concerned.
    """
    config = NVFP4Config() if config is None else config
    if not isinstance(config, NVFP4Config):
        raise ConfigError(
            "quantize_model takes an NVFP4Config",
            value=type(config).__name__,
            limit="NVFP4Config(...) or None",
            remedy="Put the options into NVFP4Config(...); None takes its defaults.",
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "quantize_model takes a module",
            value=type(model).__name__,
            limit="torch.nn.Module",
            remedy="Build or load the model first, e.g. AutoModelForCausalLM.from_pretrained(path).",
        )
    if filter_fn is not None and not callable(filter_fn):
        raise ConfigError(
            "filter_fn is not a function",
            value=repr(filter_fn),
            limit="filter_fn(module, name) -> bool",
            remedy="Pass names of layers to leave alone as ignore=[...].",
        )
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper around the model
    compiled = model if isinstance(inner, nn.Module) else None
    model = inner if isinstance(inner, nn.Module) else model
    target_device = check_device(device)
    plan = make_plan(model, ignore, filter_fn, with_head=config.lm_head != "bf16")
    preflight(plan, strict)
    if not plan.groups:
        raise ConfigError(
            "there is no layer to quantize",
            value=f"{len(plan.existing)} layers in FP4 already, {len(plan.skipped)} parameters skipped",
            limit="at least one linear layer outside the skip list and ignore",
            remedy="Shorten ignore or widen filter_fn; report(model) names what was skipped and why.",
        )
    weights, head_inputs = _calibrated(model, plan, config, strict, progress)
    before = model_bytes(model)
    layers: list[LayerReport] = list(plan.existing)
    together = {t.name: family for family in planned(model, plan) for t in family} if config.siblings != "separate" else {}
    shared_scales: dict[str, Tensor] = {}
    for group in bar(plan.groups, "quantize", "layer", progress):
        search, weight = config, None
        family = together.get(group[0].name, [])
        if family and config.siblings == "shared" and group[0].name not in shared_scales:
            shared_scales |= dict.fromkeys((t.name for t in family), shared_global_scale(family, config.scale_search))
        notes: tuple[str, ...] = ()
        if config.scale_search == "activation":
            weight = weights[group[0].name]
            if weight is None:
                search, notes = replace(config, scale_search="mse"), ("not reached by calibration: unweighted scales",)
        model, rows = convert_group(model, group, search, target_device, weight, shared_scales.get(group[0].name), head_inputs.get(group[0].name))
        layers += [LayerReport(**{**vars(row), "notes": (*row.notes, *notes)}) for row in rows]
        converted = [t.module for t in family if isinstance(t.module, FP4Linear)]
        if family and len(converted) == len(family):
            pack(converted)
    if target_device is not None:
        model.to(target_device)
    result = Report(
        layers=layers,
        skipped=plan.skipped,
        uncovered=plan.uncovered,
        bytes_before=before,
        bytes_after=model_bytes(model),
        config=f"NVFP4, scale_search={config.scale_search}, large_m={config.large_m}" + (f", lm_head={config.lm_head}" if config.lm_head != "bf16" else ""),
        notes=plan.notes,
    )
    result = annotated(result, model)
    record(model, result)
    if progress:
        print(result)
    return model if compiled is None else compiled


def _calibrated(model: nn.Module, plan: Plan, config: NVFP4Config, strict: bool, progress: bool) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """``{layer: E[x^2] per input channel}`` for the layers that want it, and ``{output head: some of its inputs}``."""
    kept: dict[str, Tensor] = {}
    if config.scale_search != "activation":
        heads = [t for t in plan.targets if t.head]
        if heads and config.calibration is not None:
            mean_squares(model, heads, config.calibration, strict=strict, progress=progress, keep=kept)
        return {}, kept
    found = mean_squares(model, plan.targets, config.calibration, strict=strict, progress=progress, keep=kept)
    # Layers that share one weight see different inputs: the weight is judged by the mean of those that were reached.
    out: dict[str, Tensor | None] = {}
    for group in plan.groups:
        reached = [w for t in group if (w := found[t.name]) is not None]
        out[group[0].name] = torch.stack([w.to(reached[0].device) for w in reached]).mean(0) if reached else None
    return out, kept
