"""What a PEFT configuration would do to the quantized layers of a model: made possible, or refused before anything is changed."""

from __future__ import annotations

import copy
from typing import Any

from peft import LoraConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ...errors import ConfigError, bullet_names, bullets
from ...modules import FP4Experts, FP4ExpertWeight, FP4Linear
from ...tensors.base import FP4Tensor
from .lora import FP4LoraLinear

_ALL = "all-linear"
# Initial values that do not depend on the base weight.
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
# Options of LoraConfig whose layers compute with the base weight.
_READS_WEIGHT = ("use_dora", "velora_config", "monteclora_config", "kasa_config", "arrow_config", "use_bdlora")


_REMEDY = "keep them in high precision: quantize_model(model, ignore=[...])."


def prepare(tuner: BaseTuner, model: nn.Module, config: Any) -> None:
    """Called before ``tuner`` puts the adapter of ``config`` into ``model``. May be called again.

    Raises:
        ConfigError: the configuration names quantized layers that it cannot be used on; the model is unchanged.
    """
    packed: dict[str, nn.Module] = {name: m for name, m in model.named_modules() if isinstance(m, (FP4Linear, FP4ExpertWeight, FP4Experts))}
    tensors = {name for name, p in model.named_parameters() if isinstance(p, FP4Tensor)}
    _refuse_parameters(config, packed, tensors)
    _refuse_copies(config, model, packed, tensors)
    if not packed:
        return
    if isinstance(getattr(config, "target_modules", None), str) and config.target_modules.lower() == _ALL:
        _take_all_linear(config, model)
    targets = _targets(tuner, config, model, packed)
    lora = isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA
    if others := [n for n, m in targets.items() if not (lora and isinstance(m, FP4Linear))]:
        names = [f"{n}: {type(targets[n]).__name__}" for n in others]
        what = "LoRA" if lora else str(config.peft_type.value)
        raise ConfigError(
            f"{what} cannot adapt these quantized layers:\n{bullet_names(names)}\n",
            value=f"{len(names)} layers in target_modules",
            limit="LoRA, on quantized linear layers (not on experts)",
            remedy=f"Leave them out of target_modules or name them in exclude_modules; or {_REMEDY}",
        )
    if not lora:
        return
    if targets:
        _check_options(config, targets)
    if config.bias == "all":
        for module in packed.values():
            if isinstance(module, FP4Linear):
                module.train_bias()
    config._register_custom_module({FP4Linear: FP4LoraLinear})


def _refuse_parameters(config: Any, packed: dict[str, nn.Module], tensors: set[str]) -> None:
    """``target_parameters`` adds the product of two small matrices to a Parameter, which packed weights are not."""
    weights = [name if isinstance(m, FP4ExpertWeight) else f"{name}.weight" for name, m in packed.items() if not isinstance(m, FP4Experts)]
    weights = [*weights, *sorted(tensors)]
    wanted = getattr(config, "target_parameters", None) or ()
    found = [w for w in weights if any(w == t or w.endswith(f".{t}") for t in wanted)]
    if found:
        raise ConfigError(
            f"target_parameters cannot adapt these quantized weights:\n{bullet_names(found)}\n",
            value=f"{len(found)} weights in target_parameters",
            limit="Parameters in high precision",
            remedy=f"Name quantized linear layers in target_modules; leave experts out, or {_REMEDY}",
        )


def _refuse_copies(config: Any, model: nn.Module, packed: dict[str, nn.Module], tensors: set[str]) -> None:
    """``modules_to_save`` trains a copy of a module, of whose quantized weights nothing can be trained."""
    wanted = getattr(config, "modules_to_save", None) or ()
    held = {*packed, *(name.rpartition(".")[0] for name in tensors)}
    found = []
    for name, module in model.named_modules() if wanted else ():
        if isinstance(module, BaseTunerLayer) or not any(name.endswith(t) for t in wanted):
            continue
        copied = f"{name}.original_module" if isinstance(module, AuxiliaryTrainingWrapper) else name
        if any(h == copied or h.startswith(f"{copied}.") for h in held):
            found.append(f"{name}: {type(module).__name__}")
    if found:
        raise ConfigError(
            f"modules_to_save cannot train these modules, whose weights are quantized:\n{bullet_names(found)}\n",
            value=f"{len(found)} modules in modules_to_save",
            limit="modules in high precision",
            remedy=f"Put an adapter beside them (target_modules), or {_REMEDY}",
        )


def _take_all_linear(config: Any, model: nn.Module) -> None:
    """PEFT's ``"all-linear"`` with the quantized layers, except the output head and what lies inside other adapters, as PEFT has it."""
    _maybe_include_all_linear_layers(config, model)
    found: set[str] = set(config.target_modules)
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    inside = {id(m) for wrapper in model.modules() if isinstance(wrapper, BaseTunerLayer) for m in wrapper.modules() if m is not wrapper}
    config.target_modules = found | {n for n, m in model.named_modules() if isinstance(m, FP4Linear) and m is not head and id(m) not in inside}


def _targets(tuner: BaseTuner, config: Any, model: nn.Module, packed: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of ``packed`` that the configuration names, by the names that they have without wrappers."""
    if not hasattr(config, "target_modules"):
        return {}
    trial: Any = tuner._prepare_adapter_config(copy.copy(config), tuner.get_model_config(model))
    if not trial.target_modules:
        return {}
    found = {}
    for name, module in packed.items():
        plain = name.removesuffix(".base_layer")
        if check_target_module_exists(trial, plain):
            found[plain] = module
    return found


def _check_options(config: LoraConfig, targets: dict[str, nn.Module]) -> None:
    wrong = [f"{option}={getattr(config, option)!r}" for option in _READS_WEIGHT if getattr(config, option, None)]
    if config.init_lora_weights not in _INITIAL:
        wrong.append(f"init_lora_weights={config.init_lora_weights!r}")
    if wrong:
        raise ConfigError(
            f"these options of LoraConfig compute with the base weight, which is quantized here:\n{bullets(wrong)}\nfor example in {next(iter(targets))}\n",
            value=wrong,
            limit=f"LoRA and aLoRA, init_lora_weights one of {list(_INITIAL)}",
            remedy="Leave the options out, or keep these layers in high precision: quantize_model(model, ignore=[...]).",
        )
