"""F4: other libraries' extension points. Importing this package imports none of them."""

from __future__ import annotations

import sys
from typing import Any


def describe_for_saving(model: Any, large_m: str, attention: str = "auto") -> None:
    """Tell a transformers model that it is quantized, so that its ``save_pretrained`` writes what ``from_pretrained`` reads."""
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):  # PEFT's wrapper around it
        model = model.get_base_model()
    if isinstance(model, PreTrainedModel):
        from .pretrained import quantizer

        quantizer.describe_for_saving(model, large_m, attention)


def adopt_adapters(model: Any) -> None:
    """Give PEFT's layers, whose base was quantized under them, a class that knows it."""
    if "peft" in sys.modules:
        from . import peft

        peft.adopt(model)
