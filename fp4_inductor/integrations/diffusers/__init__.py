"""Diffusers: models that were quantized here are saved by ``save_pretrained`` and read by ``from_pretrained``.

Importing this imports diffusers; it registers itself when diffusers' models are imported. Without this package diffusers
answers "Unknown quantization type, got fp4_inductor".

Source: diffusers 0.35 to 0.42, ``diffusers.quantizers``, ``diffusers.models.modeling_utils``.
"""

from __future__ import annotations

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .quantizer import METHOD, FP4DiffusersConfig, FP4DiffusersQuantizer
from .saving import describe, extend_save_pretrained

__all__ = ["FP4DiffusersConfig", "FP4DiffusersQuantizer", "describe", "register"]


def register() -> None:
    """Make ``from_pretrained`` and ``save_pretrained`` know packed layers. May be called again."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD.value, FP4DiffusersConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD.value, FP4DiffusersQuantizer)
    extend_save_pretrained()


register()
