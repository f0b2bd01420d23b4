"""LoRA beside a quantized weight: PEFT's own layer, without what would have to change or read the weight."""

from __future__ import annotations

from typing import Any, NoReturn

from peft.tuners.lora.layer import Linear
from torch import nn

from ...errors import UnsupportedOpError, bullet_names
from ...modules import FP4Linear

# Ways to compute that need the input and the adapter only. The others (DoRA, KaSA, ...) compute with the base weight itself.
VARIANTS = {(), ("alora_invocation_tokens",)}


class FP4LoraLinear(Linear):
    """``y = base(x) + B(A(dropout(x))) * scaling`` over a quantized ``base``: :class:`fp4_inductor.FP4Linear`, its 2:4-sparse and its FP8 form.

    The base weight is frozen; its input gets a gradient. Everything but merging is as in PEFT's ``lora.Linear``.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any):
        if config.bias != "none":
            _quantized(base_layer).train_bias()
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self.fan_in_fan_out = False  # [N, K] always, whatever the layer was before it was quantized

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        base = _quantized(module)
        return base.in_features, base.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {key: cls for key, cls in super().lora_variants.items() if key in VARIANTS}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        refuse_merge([self.kwargs.get("target_name") or str(self.get_base_layer())])


def refuse_merge(names: list[str]) -> NoReturn:
    """Raise the error of every attempt to merge an adapter into the quantized weights of ``names``."""
    raise UnsupportedOpError(
        f"an adapter cannot be merged into quantized weights: FP4 has no room for the small changes that it makes:\n{bullet_names(names)}\n",
        value=f"{len(names)} quantized layers",
        limit="adapters beside the weights",
        remedy="Keep the adapter beside the model, or load it onto the model in high precision, call merge_and_unload(), and quantize the result.",
    )


def adopt(model: nn.Module) -> None:
    """Give PEFT's LoRA layers whose base was quantized under them this class: theirs would lose a merge without a word."""
    for module in model.modules():
        if type(module) is Linear and isinstance(module.base_layer, FP4Linear):
            module.__class__ = FP4LoraLinear
            module.fan_in_fan_out = False


def _quantized(module: Any) -> FP4Linear:
    while not isinstance(module, FP4Linear):  # one wrapper may stand inside another
        module = module.base_layer
    return module
