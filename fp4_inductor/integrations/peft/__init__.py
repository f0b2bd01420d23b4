"""PEFT: LoRA on quantized layers. Importing this imports peft; it registers itself when peft is imported.

PEFT's custom-module hook (``LoraConfig._register_custom_module``) names a class for a type of layer, in one configuration. So the
points where a configuration meets a model, ``BaseTuner.__init__`` and ``inject_adapter``, are where our layers are entered, where
``target_modules="all-linear"`` comes to mean them too, and where what cannot work is refused before the model is changed.

Source: peft 0.19 to 0.21, ``peft.tuners.tuners_utils``.
"""

from __future__ import annotations

import functools
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ...modules import FP4Linear
from .lora import FP4LoraLinear, adopt, refuse_merge
from .targets import prepare

__all__ = ["FP4LoraLinear", "adopt", "register"]


def register() -> None:
    """Make PEFT know quantized layers. May be called again."""
    init, inject, check = BaseTuner.__init__, BaseTuner.inject_adapter, BaseTuner._check_merge_allowed
    if hasattr(inject, "_fp4_inductor"):
        return

    @functools.wraps(init)
    def tuner_init(self: BaseTuner, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        # Several methods (VeRA, RandLora) look for their layers before they inject anything, and do not say which they did not take.
        prepare(self, model, peft_config if isinstance(peft_config, PeftConfig) else peft_config[adapter_name])
        init(self, model, peft_config, adapter_name, *args, **kwargs)

    @functools.wraps(inject)
    def inject_adapter(self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        prepare(self, model, self.peft_config[adapter_name])
        inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(check)
    def check_merge_allowed(self: BaseTuner) -> None:
        # Before the first layer is merged: a model whose layers are merged in part is neither the one nor the other.
        wrapped = [n for n, m in self.model.named_modules() if isinstance(getattr(m, "base_layer", None), FP4Linear)]
        if wrapped:
            refuse_merge(wrapped)
        check(self)

    inject_adapter._fp4_inductor = True  # type: ignore[attr-defined]
    BaseTuner.__init__ = tuner_init  # type: ignore[method-assign]
    BaseTuner.inject_adapter = inject_adapter  # type: ignore[method-assign]
    BaseTuner._check_merge_allowed = check_merge_allowed  # type: ignore[method-assign]


register()
