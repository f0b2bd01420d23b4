"""The public functions that change, write and read whole models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from . import checkpoint
from .checkpoint import save
from .checkpoint.layer_folder import layer_folder
from .config import Attention, NVFP4Config, Sparse24Config, check_attention, weight_only
from .decoding.attention import use_attention_backend
from .decoding.regions import use_regions
from .errors import ConfigError
from .formats import nvfp4
from .integrations import adopt_adapters, describe_for_saving, own_configs
from .integrations.transformers import use_experts_backend
from .integrations.whole import prefill_of
from .models.activation_cost import activation_cost
from .models.compile_ahead import compile_ahead
from .models.convert import convert_experts, convert_group
from .models.coverage import LayerReport, Report, add_notes, record
from .models.plan import ExpertsTarget, QuantizationPlan, make_plan, model_bytes
from .models.preflight import check_device, nothing_to_quantize, preflight
from .models.probe import Probe
from .models.progress import bar
from .models.rounding_error import LOUD
from .models.scale_choice import choose
from .models.siblings import annotated, planned, shared_global_scale
from .models.sparsify import Outcome, sparsify
from .models.sparsify_experts import install_packed
from .models.stacks import convert_stack
from .models.training import Training, outside_inference_mode
from .modules import FP4Linear, pack_siblings

__all__ = ["load", "quantize_model", "save"]


@outside_inference_mode
def quantize_model(
    model: nn.Module,
    config: NVFP4Config | Sparse24Config | None = None,
    *,
    ignore: Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    strict: bool | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
) -> nn.Module:
    """Replace the linear layers and experts of ``model`` by NVFP4 ones, dense or 2:4-sparse, in place, and print a report.

    ``nn.Linear`` (and subclasses whose forward computes the same) and transformers' ``Conv1D`` become :class:`FP4Linear`; modules
    that hold the weights of routed experts as 3-D Parameters become :class:`fp4_inductor.modules.FP4Experts`. Output
    heads, everything tied to an embedding, routers, convolutions and vision towers stay as they are, each with its
    reason in the report (``fp4_inductor.report(model)``). Linear layers that share one weight share the quantized one.

    What is trained is left alone, each weight with its reason in the report: adapters (PEFT's layers, known by their base class, while
    the frozen weights that they wrap are quantized), and weights that require a gradient in a model whose other weight matrices are
    frozen. A model whose weights all require a gradient, as every freshly loaded model's do, is quantized whole; quantized weights
    get no gradient, their inputs do. A bias that requires a gradient beside a frozen weight stays a Parameter and is trained.

    Every layer is checked before the first is changed; then they are replaced one by one, each dense weight being
    released before the next is touched, so peak memory is the model plus one layer.

    Args:
        model: any module, in bfloat16, float16 or float32. Quantize before ``torch.compile``.
        config: an :class:`NVFP4Config`, or a :class:`Sparse24Config` for 2:4-sparse weights; None: ``NVFP4Config()``.
        ignore: layers to leave alone, besides the default list: names (``"model.layers.0"`` takes all below it), last
            components (``"lm_head"``, ``"mlp.down_proj"``), or ``"re:..."`` matched from the start of the name.
        filter_fn: ``filter_fn(module, name) -> bool``; False leaves the module alone.
        device: quantize on this device and leave the whole model there. Each layer moves when its turn comes, so the
            dense model never has to fit there. None: every layer is quantized where it is.
        progress: show progress bars and print the report.
        strict: True raises if a linear or expert weight outside the skip list cannot be quantized. None raises if such
            weights are more than 5 % of those outside the skip list, and False does not raise. What is not quantized stays
            in high precision, each weight with its reason in the report, whose coverage says how much it is.
        checkpoint_dir: a folder, made if needed, in which ``scale_search="gptq"`` keeps the text that the model writes and each layer as soon as it is
            rounded. A run that was interrupted goes on where it was if it is called again with the same model, calibration, options and
            folder, and gives the bits of an uninterrupted one; the report says how many layers came from the folder. The folder takes about
            as much space as the quantized weights. It stays; remove it when the model is saved.

    Returns:
        ``model`` (a new :class:`FP4Linear` if ``model`` itself is a linear layer).

    Raises:
        CoverageError, GatingError, NonFiniteError, DTypeError, ShapeError, DeviceError, ConfigError, PreflightError, CalibrationError:
            before anything was changed; the message lists every layer concerned.
        CheckpointError: before anything was changed: ``checkpoint_dir`` is of another model, calibration or options, damaged, used by another run,
            or there is no space.
    """
    config = NVFP4Config() if config is None else config
    if not isinstance(config, (NVFP4Config, Sparse24Config)):
        raise ConfigError(
            "quantize_model takes an NVFP4Config or a Sparse24Config",
            value=type(config).__name__,
            limit="NVFP4Config(...), Sparse24Config(...) or None",
            remedy="Put the options into one of them; None takes NVFP4Config's defaults.",
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
    store = layer_folder(checkpoint_dir, config)
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper around the model
    compiled = model if isinstance(inner, nn.Module) else None
    model = inner if isinstance(inner, nn.Module) else model
    target_device = check_device(device)
    Training.of(model).refuse_merged()
    dense = isinstance(config, NVFP4Config)
    plan = make_plan(model, ignore, filter_fn, with_head=dense and config.lm_head != "bf16", with_stacks=dense)  # type: ignore[union-attr]
    preflight(plan, strict)
    if not (plan.groups or plan.experts or plan.stacks):
        raise nothing_to_quantize(plan, model, ignore, filter_fn is not None)
    strict = strict is not False  # from here on it is about calibration, which reaches every layer or says which it does not
    asked = _Asked(config, target_device, progress, compiled, model_bytes(model))
    layers: list[LayerReport] = list(plan.existing)
    if isinstance(config, Sparse24Config):
        outcome = sparsify(model, plan, config, target_device, strict, progress)
        model, layers, plan.notes = outcome.model, layers + outcome.layers, plan.notes + outcome.notes
        described = f"2:4-sparse NVFP4, pruning={config.pruning}, scale_search={config.search}, prefill={config.prefill}"
        return _finish(asked, model, plan, layers, described, outcome)
    with store or nullcontext():
        scales = choose(model, plan, config, target_device, strict=strict, progress=progress, store=store)
    together = {t.name: family for family in planned(model, plan) for t in family} if config.siblings != "separate" else {}
    shared_scales = scales.global_scales
    for item in bar([*plan.groups, *plan.experts], "quantize", "layer", progress):
        search, weight, notes = scales.of(item)
        if isinstance(item, ExpertsTarget):
            both = scales.experts.pop(item.name, None)
            if both is not None:
                model, rows = install_packed(model, both, weight_only(config.prefill), target_device)
            else:
                model, rows = convert_experts(model, item, search, target_device, weight)
        else:
            name = item[0].name
            family = together.get(name, [])
            if family and config.siblings == "shared" and name not in shared_scales:
                shared_scales |= dict.fromkeys((t.name for t in family), shared_global_scale(family, search.scale_search))
            ready, head_inputs = scales.ready.pop(name, None), scales.head_inputs.get(name)
            model, rows = convert_group(model, item, search, target_device, weight, shared_scales.get(name), head_inputs, ready)
            converted = [t.module for t in family if isinstance(t.module, FP4Linear)]
            if family and len(converted) == len(family):
                pack_siblings(converted)
        layers += [LayerReport(**{**vars(row), "notes": (*row.notes, *notes), "predicted_kl": scales.predicted_kl.get(row.name)}) for row in rows]
    layers += [
        convert_stack(stack, scales.config.scale_search, target_device) for stack in bar(plan.stacks, "quantize", "stack", progress and bool(plan.stacks))
    ]
    plan.notes += scales.notes
    described = f"NVFP4, scale_search={scales.config.scale_search}, prefill={config.prefill}"
    described += f", lm_head={config.lm_head}" if config.lm_head != "bf16" else ""
    return _finish(asked, model, plan, layers, described, probe=scales.probe, kl=scales.kl)


class _Asked(NamedTuple):
    """What quantize_model was asked for, and the model it was given: ``compiled`` is torch.compile's wrapper around it, if there is one."""

    config: NVFP4Config | Sparse24Config
    device: torch.device | None
    progress: bool
    compiled: nn.Module | None
    bytes_before: int


def _finish(
    asked: _Asked,
    model: nn.Module,
    plan: QuantizationPlan,
    layers: list[LayerReport],
    described: str,
    outcome: Outcome | None = None,
    probe: Probe | None = None,
    kl: float | None = None,
) -> nn.Module:
    """Move the model, record and print its report; ``described``: the options that matter, for the report; ``kl``: measured already."""
    config = asked.config
    if asked.device is not None:
        model.to(asked.device)
    own_configs(model)
    use_experts_backend(model)
    adopt_adapters(model)
    plan.notes += use_attention_backend(model, config.attention)
    describe_for_saving(model, config.prefill, config.attention)
    compile_ahead(model)
    use_regions(model)
    kl = outcome.measure(model) if outcome is not None else kl
    loud = outcome.verdict(kl) if outcome is not None else []
    if config.prefill == "nvfp4":
        kl, notes, loud = activation_cost(model, probe)
        plan.notes += notes
    loud += [
        f"{row.name}: relative error {row.relative_error:.2f}. Single weights that are far larger than the others make those zero; repair or ignore the layer."
        for row in layers
        if row.relative_error is not None and row.relative_error >= LOUD and row.format == nvfp4.NAME
    ]
    result = Report(
        layers=layers,
        skipped=plan.skipped,
        uncovered=plan.uncovered,
        bytes_before=asked.bytes_before,
        bytes_after=model_bytes(model),
        config=described,
        notes=plan.notes,
        kl=kl,
        warnings=loud,
    )
    result = annotated(result, model)
    record(model, result)
    if asked.progress:
        print(result)
    return model if asked.compiled is None else asked.compiled


@outside_inference_mode
def load(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    dir: str | os.PathLike,
    device: torch.device | str | None = None,
    strict: bool = True,
    attention: Attention = "auto",
):
    """Read a checkpoint written by :func:`fp4_inductor.save`, bit for bit.

    Args:
        model_or_factory: a module of the saved architecture (dense, already quantized, or on the meta device), changed
            in place; or a function without arguments that makes one. The function's Parameters are never allocated (it
            may be called a second time if its constructor needs their values), and the model it makes is returned in
            eval mode. Saved dtypes win over the model's.
        dir: the checkpoint.
        device: where the model goes; None: where its tensors are (the CPU for meta tensors).
        strict: False lets tensors be missing from the checkpoint (the model keeps its own) or from the model (ignored),
            with a warning that names them. Damage and wrong shapes are errors in any case.
        attention: as in :class:`fp4_inductor.NVFP4Config`.

    Returns:
        The model; ``fp4_inductor.report`` knows the relative errors that were recorded when it was quantized. Siblings
        are packed as ``quantize_model`` does it.

    Raises:
        CheckpointError: damaged, inconsistent, incomplete, or of another model; the model is unchanged.
    """
    check_attention(attention)
    loaded = checkpoint.load(model_or_factory, dir, device, strict)
    model = getattr(loaded, "_orig_mod", loaded)  # torch.compile's wrapper
    own_configs(model)
    use_experts_backend(model)
    adopt_adapters(model)
    add_notes(model, use_attention_backend(model, attention))
    compile_ahead(model)
    use_regions(model)
    describe_for_saving(model, prefill_of(model), attention)
    return loaded
