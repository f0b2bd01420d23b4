"""Hugging Face Transformers: quantized checkpoints and quantization while loading. Importing this imports transformers."""

from __future__ import annotations

import warnings

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer

from ...decoding import attention
from .. import transformers as experts
from .config import FP4InductorConfig, ModelOptConfig
from .export import export_pretrained
from .load import load_pretrained
from .quantizer import FP4InductorQuantizer
from .saving import register as extend_save_pretrained

__all__ = ["FP4InductorConfig", "ModelOptConfig", "export_pretrained", "load_pretrained", "register"]


def register() -> list[str]:
    """Make ``from_pretrained`` know ``quant_method`` "modelopt" and "fp4_inductor"; returns those another library has taken.

    The attention and experts implementations are registered too: a pickled model names them in its config.
    """
    attention.register()
    experts.register()
    extend_save_pretrained()
    taken = []
    for method, config in (("fp4_inductor", FP4InductorConfig), ("modelopt", ModelOptConfig)):
        here = AUTO_QUANTIZER_MAPPING.get(method)
        if here is None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(config)
            register_quantizer(method)(FP4InductorQuantizer)
        elif here is not FP4InductorQuantizer:
            taken.append(method)
    return taken


if _taken := register():
    warnings.warn(
        f"transformers: another library is the quantizer of {', '.join(_taken)}; fp4_inductor.load_pretrained reads such checkpoints all the same",
        RuntimeWarning,
        stacklevel=2,
    )
