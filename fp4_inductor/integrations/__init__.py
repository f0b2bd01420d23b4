"""F4: other libraries' extension points. Importing this package imports none of them."""

from __future__ import annotations

import copy
import sys
from typing import Any


def own_configs(model: Any) -> None:
    """Give the Transformers models in ``model`` config objects of their own: another model may have been built from the same ones.

    What is written into a config (the quantization, the attention and experts implementations) then stays with this model.
    """
    library = sys.modules.get("transformers.configuration_utils")
    if library is None:
        return
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, library.PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)  # one copy of each, wherever it is met


def describe_for_saving(model: Any, prefill: str, attention: str = "auto") -> None:
    """Tell a model of transformers or diffusers that it is quantized, so that its ``save_pretrained`` writes what ``from_pretrained`` reads."""
    diffusers_models = sys.modules.get("diffusers.models.modeling_utils")
    if diffusers_models is not None and isinstance(model, diffusers_models.ModelMixin):
        from . import diffusers

        diffusers.describe(model)
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):  # PEFT's wrapper around it
        model = model.get_base_model()
    if isinstance(model, PreTrainedModel):
        from .pretrained import quantizer

        quantizer.describe_for_saving(model, prefill, attention)


def adopt_adapters(model: Any) -> None:
    """Give PEFT's layers, whose base was quantized under them, a class that knows it."""
    if "peft" in sys.modules:
        from . import peft

        peft.adopt(model)
