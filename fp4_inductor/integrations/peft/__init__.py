"""PEFT: LoRA on quantized layers. Importing this imports peft; it registers itself when peft is imported.

PEFT's custom-module hook (``LoraConfig._register_custom_module``) names a class for a type of layer, in one configuration. So the
point where a configuration meets a model, ``BaseTuner.inject_adapter``, is where our layers are entered, where
``target_modules="all-linear"`` comes to mean them too, and where what cannot work is refused before the model is changed.

Source: peft 0.17 to 0.21, ``peft.tuners.tuners_utils``.
"""

from __future__ import annotations

import functools
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ...modules import FP4Linear
from .lora import FP4LoraLinear, adopt, refuse_merge
from .targets import prepare

__all__ = ["FP4LoraLinear", "adopt", "register"]


def register() -> None:
    """Make PEFT know quantized layers. May be called again."""
    inject, check = BaseTuner.inject_adapter, BaseTuner._check_merge_allowed
    if hasattr(inject, "_fp4_inductor"):
        return

    @functools.wraps(inject)
    def inject_adapter(self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        prepare(self, model, adapter_name)
        inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(check)
    def check_merge_allowed(self: BaseTuner) -> None:
        # Before the first layer is merged: a model whose layers are merged in part is neither the one nor the other.
        wrapped = [n for n, m in self.model.named_modules() if isinstance(getattr(m, "base_layer", None), FP4Linear)]
        if wrapped:
            refuse_merge(wrapped)
        check(self)

    inject_adapter._fp4_inductor = True  # type: ignore[attr-defined]
    BaseTuner.inject_adapter = inject_adapter  # type: ignore[method-assign]
    BaseTuner._check_merge_allowed = check_merge_allowed  # type: ignore[method-assign]


register()
