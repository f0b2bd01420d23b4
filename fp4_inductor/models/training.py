"""Which parts of a model belong to training: adapters, and weights that somebody left trainable on purpose.

``requires_grad`` alone says nothing: every Parameter of a freshly loaded model has it. It says something once *some* weight matrices
are frozen and others are not, because somebody decided that. So a trainable matrix beside a frozen one is left alone, and a model
whose matrices are all trainable, or all frozen, is quantized whole. So is a model whose constructor freezes a part and whose flags are
still those that it set (:mod:`.as_built`). Adapters of PEFT are known by PEFT's own base classes, whatever
``requires_grad`` says: an adapter that was loaded for inference is frozen, and is still an adapter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ..errors import ConfigError, bullet_names
from .as_built import buildable, requires_grad_as_built
from .kinds import expert_family, stack_owner

_P = ParamSpec("_P")
_R = TypeVar("_R")
ADAPTER = "adapter: trained beside the base weight, which it belongs to"
TRAINABLE = "trainable, while other weights of the model are frozen: requires_grad_(False) lets it be quantized"
# Names in PEFT's wrappers under which the wrapped module is found.
_WRAPPED = ("base_layer", "original_module")
# Tuner layers of PEFT (0.19 to 0.21) whose forward only calls the wrapped linear layer: ``(module, class)``. All others read its weight.
_CALLS_ITS_BASE = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.ia3.layer", "Linear"), ("peft.tuners.vera.layer", "Linear")}
_CALLS_ITS_BASE |= {("peft.tuners.loha.layer", "Linear"), ("peft.tuners.lokr.layer", "Linear"), ("fp4_inductor.integrations.peft.lora", "FP4LoraLinear")}


@dataclass
class Training:
    """What of one model is not to be quantized because it is, or was, trained.

    Args:
        reasons: module id -> the clause for the report, for modules inside PEFT's wrappers.
        merged: names of wrappers whose base weight has an adapter merged into it.
        chosen: some weight matrices are frozen and some are not, and not by the constructor of the model.
    """

    reasons: dict[int, str] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    chosen: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Training:
        """Read off ``model``."""
        found = cls()
        base = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
        wrapper = getattr(sys.modules.get("peft.utils.other"), "AuxiliaryTrainingWrapper", None)
        whole = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
        for name, module in model.named_modules():
            if base is not None and isinstance(module, base):
                found._wrapper(name, module)
            elif wrapper is not None and isinstance(module, wrapper):
                found._mark(module, ADAPTER)
            elif whole is not None and isinstance(module, whole):  # the encoders of prompts stand beside the model
                for child, part in module.named_children():
                    if child != "base_model":
                        found._mark(part, ADAPTER)
        flags = {name: p.requires_grad for name, p in found._matrices(model)}
        found.chosen = len(set(flags.values())) > 1 and not _by_constructors(model, flags)
        return found

    def reason(self, module: nn.Module) -> str | None:
        """Why the weight of ``module`` stays as it is, or None."""
        if id(module) in self.reasons:
            return self.reasons[id(module)]
        if self.chosen and any(p.requires_grad for _, p in _own_matrices(module)):
            return TRAINABLE
        return None

    def refuse_merged(self) -> None:
        """Raise if a base weight has an adapter merged into it: rounded, it could not be unmerged again."""
        if self.merged:
            raise ConfigError(
                f"adapters are merged into the weights of these layers:\n{bullet_names(self.merged)}\n",
                value=f"{len(self.merged)} merged layers",
                limit="adapters beside the weights, or none",
                remedy="Call unmerge_adapter() to keep the adapters apart, or merge_and_unload() to make them part of the model.",
            )

    def _wrapper(self, name: str, module: Any) -> None:
        if getattr(module, "merged", False):
            self.merged.append(name)
        variants = [type(v).__name__ for v in getattr(module, "lora_variant", {}).values()]
        variants = [v for v in variants if not v.startswith("ALora")]  # that one changes which tokens the adapter sees
        cls = type(module)
        if (cls.__module__, cls.__name__) in _CALLS_ITS_BASE and not variants:
            self._mark(module, ADAPTER)
        else:
            what = variants[0] if variants else f"{cls.__module__.removeprefix('peft.tuners.')}.{cls.__name__}"
            self._mark(module, ADAPTER, f"adapter: {what} of PEFT computes with this weight itself")

    def _mark(self, module: nn.Module, reason: str, base_reason: str | None = None) -> None:
        """Everything below ``module`` gets ``reason``, except what it wraps, which gets ``base_reason`` or none."""
        inside = {id(m) for key in _WRAPPED if isinstance(wrapped := module._modules.get(key), nn.Module) for m in wrapped.modules()}
        for part in module.modules():
            if id(part) not in inside:
                self.reasons[id(part)] = reason
            elif base_reason is not None:
                self.reasons[id(part)] = base_reason

    def _matrices(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in model.named_modules():
            if id(module) not in self.reasons:
                owner = stack_owner(model, path, module)
                yield from ((f"{path}.{name}" if path else name, p) for name, p in _own_matrices(module, owner))


def _own_matrices(module: nn.Module, owner: nn.Module | None = None) -> Iterator[tuple[str, nn.Parameter]]:
    """What a quantizer could take: not embeddings and convolutions, which several models freeze by themselves, nor position tables and vectors."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)):
        return
    linear = hasattr(module, "in_features") or type(module).__name__.endswith(("Linear", "Conv1D"))
    for name, p in module._parameters.items():
        if p is None or type(p) is not nn.Parameter or not p.dtype.is_floating_point:
            continue
        if linear if p.dim() == 2 else expert_family(owner or module, name, p) is not None:
            yield name, p


def _by_constructors(model: nn.Module, flags: dict[str, bool]) -> bool:
    """Whether the constructors of Transformers' models in ``model`` account for all that differs in ``flags``."""
    rest = dict(flags)
    for path, part in buildable(model):
        inside = {name: flag for name, flag in flags.items() if name.startswith(path)}
        if len(set(inside.values())) < 2:
            continue
        built = requires_grad_as_built(part)
        if built is not None and all(built.get(name.removeprefix(path)) == flag for name, flag in inside.items()):
            rest = {name: flag for name, flag in rest.items() if name not in inside}
    return len(set(rest.values())) < 2


def plain_name(name: str) -> str:
    """``name`` as it is without PEFT's wrappers, for rules that go by the names of layers."""
    for prefix in ("base_model.model.", "base_model."):
        name = name.removeprefix(prefix)
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """``module``, and what it wraps if it is one of PEFT's wrappers."""
    found = [module]
    while (inner := next((found[-1]._modules[k] for k in _WRAPPED if found[-1]._modules.get(k) is not None), None)) is not None:
        found.append(inner)
    return found


def trainable_bias(layer: nn.Module) -> nn.Parameter | None:
    """The bias of a linear layer if it is to be trained while the weight is not, or None.

    A bias that is trainable beside a trainable weight says nothing: it is frozen with the weight.
    """
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return bias if bias is not None and bias.requires_grad and weight is not None and not weight.requires_grad else None


def outside_inference_mode(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which leaves ``torch.inference_mode`` while it runs: no backward may touch a tensor that is made inside."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
