"""Everything that could go wrong while quantizing a model, found before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import (
    ConfigError,
    CoverageError,
    DeviceError,
    DTypeError,
    FP4Error,
    GatingError,
    NonFiniteError,
    PreflightError,
    ShapeError,
    bullet_errors,
    bullets,
    list_names,
)
from ..formats import nvfp4
from .coverage import Skipped
from .plan import ExpertsTarget, QuantizationPlan, Target, is_lazy, weight_count

# A call that does not say ``strict`` leaves up to this share of the linear and expert weights in high precision, each with its
# reason in the report. At 5 % the quantized weights are an eighth larger than they could be; whoever has more at stake is asked.
SMALL_SHARE = 0.05
_OWN = {"weight", "bias"}


def preflight(plan: QuantizationPlan, strict: bool | None) -> None:
    """Raise one typed error that lists every problem of every layer, or return with nothing changed.

    ``strict``: True refuses any linear or expert weight that would stay, None more than :data:`SMALL_SHARE` of them, False none.
    Problems of one kind raise that kind (``NonFiniteError``, ``DTypeError``, ...); mixed ones raise ``PreflightError``.
    """
    problems: list[FP4Error] = []
    readable: list[tuple[str, Tensor]] = []
    for target in plan.targets:
        found = _structure(target)
        problems += found
        if not found:
            module = target.module
            readable += [(f"{target.name}.{n}".lstrip("."), p) for n, p in module.named_parameters(recurse=False)]
    for experts in plan.experts:
        found = _experts_structure(experts)
        problems += found
        if not found:
            readable += [(f"{experts.name}.{n}".lstrip("."), experts.module.get_parameter(n)) for n in experts.spec.parameters]
    for stack in plan.stacks:
        found = _weight_problems(stack.name, stack.weight, 3) + _instance_problems(stack.name.rpartition(".")[0], stack.module)
        problems += found
        readable += [] if found else [(stack.name, stack.weight)]
    problems += _non_finite(readable)
    problems += uncovered_errors(plan, strict)
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    kinds = {type(p) for p in problems}
    kind = kinds.pop() if len(kinds) == 1 else PreflightError
    error = kind(
        f"{len(problems)} layers cannot be quantized; nothing was changed:\n{bullet_errors(problems)}\n",
        value=f"{len(problems)} problems",
        limit="none",
        remedy="Do what each line says, or name the layers in ignore=[...].",
    )
    error.problems = problems
    raise error


def check_device(device: torch.device | str | None) -> torch.device | None:
    """A usable device, or DeviceError."""
    if device is None:
        return None
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "not a device", value=repr(device), limit='"cpu", "cuda", "cuda:1", a torch.device', remedy="Leave device out to keep tensors where they are."
        ) from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without CUDA
        reason = str(error).split("\n")[0]
        raise DeviceError(
            "this device cannot be used here",
            value=f"{device} ({reason})",
            limit="a device this build of torch can allocate on",
            remedy='Pass device="cpu", or install the build of torch for this device.',
        ) from error
    if device.type == "meta":
        raise DeviceError(
            "a model on the meta device would have no values",
            value="meta",
            limit="a device with memory",
            remedy='Pass device="cpu" or "cuda", or leave it out to keep tensors where they are.',
        )
    return device


def _structure(target: Target) -> list[FP4Error]:
    module, name = target.module, target.name or "the model"
    weight = module._parameters.get("weight")
    if nn.utils.parametrize.is_parametrized(module):
        return [
            ConfigError(
                "is parametrized",
                name=name,
                value=", ".join(module.parametrizations),  # type: ignore[arg-type, union-attr]
                limit="plain Parameters",
                remedy="Call torch.nn.utils.parametrize.remove_parametrizations first, or ignore the layer.",
            )
        ]
    if weight is None:
        return [
            ConfigError(
                "is computed by a hook (weight_norm, pruning)",
                name=f"{name}.weight",
                value=list(module._parameters),
                limit="a Parameter called weight",
                remedy="Remove the reparametrization first, or ignore the layer.",
            )
        ]
    if is_lazy(weight):
        return [
            ShapeError("is lazy and has no shape yet", name=name, value=type(weight).__name__, limit="[N, K]", remedy="Run the model once, then quantize it.")
        ]
    found = _weight_problems(f"{name}.weight", weight, 2) + _instance_problems(name, module)
    others = (set(module._parameters) | set(module._buffers) | set(module._modules)) - _OWN
    if others:
        found.append(ConfigError("holds more than a weight and a bias", name=name, value=sorted(others), limit=sorted(_OWN), remedy="Ignore the layer."))
    bias = module._parameters.get("bias")
    if bias is not None and bias.device != weight.device:
        found.append(
            DeviceError(
                "has weight and bias on different devices",
                name=name,
                value=f"{weight.device}, {bias.device}",
                limit="one device",
                remedy="Move the layer with .to(device), or ignore it.",
            )
        )
    return found


def _experts_structure(target: ExpertsTarget) -> list[FP4Error]:
    module, name = target.module, target.name or "the model"
    found = _instance_problems(name, module)
    for n in target.spec.parameters:
        found += _weight_problems(f"{name}.{n}", module.get_parameter(n), 2 if n.endswith("_bias") else 3)
    weights = [module.get_parameter(n) for n in target.spec.parameters]
    if len({p.device for p in weights}) > 1 or len({p.dtype for p in weights}) > 1:
        found.append(
            DeviceError(
                "has expert weights that differ in device or dtype",
                name=name,
                value=", ".join(f"{p.device} {p.dtype}" for p in weights),
                limit="one device, one dtype",
                remedy="Move and cast the module with .to(...), or ignore it.",
            )
        )
    others = (set(module._parameters) | set(module._buffers)) - set(target.spec.parameters)
    if others:
        found.append(
            ConfigError("holds more than expert weights", name=name, value=sorted(others), limit=sorted(target.spec.parameters), remedy="Ignore the module.")
        )
    return found


def _weight_problems(name: str, weight: Tensor, dims: int) -> list[FP4Error]:
    if type(weight) is not nn.Parameter:
        return [
            DTypeError(
                "is a tensor subclass (already quantized, or distributed)",
                name=name,
                value=type(weight).__name__,
                limit="nn.Parameter",
                remedy="Give the layer a plain dense weight (dequantized, gathered), or ignore it.",
            )
        ]
    found: list[FP4Error] = []
    if weight.dtype not in nvfp4.HIGH_PRECISION:
        remedy = "Cast the model with .float() first." if weight.dtype == torch.float64 else "This layer looks quantized already: dequantise it, or ignore it."
        found.append(DTypeError("is not in high precision", name=name, value=weight.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=remedy))
    if weight.dim() != dims:
        what, limit = ("matrix", "[N, K]") if dims == 2 else ("stack of matrices", "[E, N, K]")
        found.append(ShapeError(f"is not a {what}", name=name, value=tuple(weight.shape), limit=limit, remedy=f"Reshape it to {limit}, or ignore the layer."))
    if weight.device.type == "meta":
        found.append(
            DeviceError(
                "is on the meta device",
                name=name,
                value=weight.device,
                limit="materialised weights",
                remedy="Load the weights first (from_pretrained, to_empty + load_state_dict).",
            )
        )
    return found


def _instance_problems(name: str, module: nn.Module) -> list[FP4Error]:
    found: list[FP4Error] = []
    if "forward" in vars(module):
        found.append(
            ConfigError(
                "was replaced on the instance (accelerate offloading does that)",
                name=f"{name}.forward",
                value=repr(vars(module)["forward"])[:200],
                limit=f"{type(module).__name__}.forward",
                remedy="Remove the hooks first (accelerate.hooks.remove_hook_from_module), or ignore the layer.",
            )
        )
    if module._state_dict_hooks or module._load_state_dict_pre_hooks:
        hooks = [getattr(h, "__qualname__", type(h).__name__) for h in (*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values())]
        found.append(ConfigError("has state_dict hooks", name=name, value=", ".join(hooks), limit="none", remedy="Remove them first, or ignore the layer."))
    return found


def _non_finite(tensors: list[tuple[str, Tensor]]) -> list[FP4Error]:
    """One flag per tensor, read back with one synchronisation per device."""
    flags: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = {}
    for name, t in tensors:
        low, high = torch.aminmax(t.detach())
        flags.setdefault(t.device, []).append((name, t, torch.isfinite(low) & torch.isfinite(high)))
    found: list[FP4Error] = []
    for items in flags.values():
        for (name, t, _), finite in zip(items, torch.stack([flag for *_, flag in items]).tolist(), strict=True):
            if not finite:
                count = int((~torch.isfinite(t)).sum())
                found.append(
                    NonFiniteError(
                        "holds NaN or Inf",
                        name=name,
                        value=f"{count} of {t.numel()} elements",
                        limit="finite values",
                        remedy="Repair the weight, or ignore the layer.",
                    )
                )
    return found


def uncovered_errors(plan: QuantizationPlan, strict: bool | None) -> list[FP4Error]:
    """What :func:`preflight` raises, for this ``strict``, for the weights that ``plan`` does not cover."""
    if strict is False or (strict is None and uncovered_share(plan) <= SMALL_SHARE):
        return []
    found: list[FP4Error] = [_gating(plan)] if plan.gating else []
    return [*found, _coverage(plan)] if len(plan.uncovered) > len(plan.gating) else found


def _gating(plan: QuantizationPlan) -> GatingError:
    return GatingError(
        f"what these experts compute is not known, and is not assumed; nothing was changed:\n{_by_reason(plan.gating)}\n",
        value=f"{len(plan.gating)} expert weights",
        limit="modules with transformers' experts interface and an activation of fp4.moe",
        remedy="Pass strict=False to keep them in high precision, name them in ignore=[...], or describe the family in fp4_inductor/models.",
    )


def _by_reason(items: list[Skipped]) -> str:
    """A line for each reason, that of the most weights first."""
    groups: dict[str, list[Skipped]] = {}
    for item in items:
        groups.setdefault(item.reason, []).append(item)
    ordered = sorted(groups.items(), key=lambda group: -sum(i.params for i in group[1]))
    return bullets([f"{list_names(i.name for i in group)} ({sum(i.params for i in group)} weights): {reason}" for reason, group in ordered])


def uncovered_share(plan: QuantizationPlan) -> float:
    """The share, 0 to 1, of the linear and expert weights outside the skip list that ``plan`` leaves in high precision."""
    missed, total = _weights(plan)
    return missed / max(total, 1)


def _weights(plan: QuantizationPlan) -> tuple[int, int]:
    """Linear and expert weights outside the skip list: those that stay, and all of them."""
    missed = sum(s.params for s in plan.uncovered)
    planned = sum(map(weight_count, plan.targets)) + sum(map(weight_count, plan.experts)) + sum(map(weight_count, plan.stacks))
    return missed, missed + planned + sum(i.params for i in plan.existing)


def _coverage(plan: QuantizationPlan) -> CoverageError:
    missed, total = _weights(plan)
    share = f"{100.0 * missed / max(total, 1):.1f}% of the linear and expert weights"
    return CoverageError(
        f"{share} would stay in high precision; nothing was changed:\n{_by_reason(plan.uncovered)}\n",
        value=f"{missed} of {total} weights",
        limit=f"{100 * SMALL_SHARE:.0f}% may stay by default, none with strict=True",
        remedy="Pass strict=False to quantize the rest and keep these, or name them in ignore=[...].",
    )


def nothing_to_quantize(plan: QuantizationPlan, model: nn.Module, ignore: object, filtered: bool) -> ConfigError:
    """Why ``plan`` has no layer, and what to do about this reason.

    Args:
        ignore, filtered: what the caller passed as ``ignore``, and whether there was a ``filter_fn``.
    """
    chosen = [s for s in plan.skipped if s.reason.startswith("ignore=") or s.reason == "filter_fn"]
    options = " and ".join(["ignore"] * bool(ignore) + ["filter_fn"] * filtered)
    if plan.existing:
        what, value = "every layer that can be quantized is in FP4 already", f"{len(plan.existing)} quantized layers"
        limit, remedy = "a dense model", "Use the model as it is. For other options, load the dense model again and quantize that."
    elif plan.uncovered:
        reasons = dict.fromkeys(s.reason for s in plan.uncovered)
        what, value = "no layer can be quantized", f"{len(plan.uncovered)} weights that cannot: {'; '.join(list(reasons)[:5])}"
        limit, remedy = "at least one linear layer or module of experts that can", "Use the model as it is; fp4_inductor.report(model) names each weight."
    elif chosen and options:
        what, value = f"{options} left no layer to quantize", f"{len(chosen)} parameters left alone"
        limit, remedy = "at least one linear layer", f"Shorten ignore, or return True for more modules: {options} took them all."
        remedy = {"ignore": "Shorten ignore.", "filter_fn": "Let filter_fn return True for the layers to quantize."}.get(options, remedy)
    else:
        kinds = dict.fromkeys(s.reason for s in sorted(plan.skipped, key=lambda s: -s.params))
        what = f"{type(model).__name__} has no linear layer to quantize"
        value = "; ".join(list(kinds)[:5]) or "a model without parameters"
        limit, remedy = (
            "at least one linear layer or module of experts outside the skip list",
            "Use the model as it is, or pass the part that has linear layers.",
        )
    return ConfigError(f"{what}; nothing was changed", value=value, limit=limit, remedy=remedy)
