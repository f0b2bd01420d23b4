"""Readers of other libraries' checkpoints, one file a format. To add one, write a module as :class:`Format` describes and list it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from . import compressed_tensors, gguf, gpt_oss, modelopt, native, torchao
from .weight import Format, Found, StoredWeight

FORMATS: dict[str, Format] = {module.METHOD: module for module in (modelopt, compressed_tensors, gpt_oss, torchao, gguf, native)}

__all__ = ["FORMATS", "Format", "Found", "StoredWeight", "format_of"]


def format_of(config: Mapping[str, Any] | None) -> Format:
    """The reader of a ``quantization_config``, checked for variants it cannot read."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and (method is None and _names_modelopt(config)):
        method = "modelopt"
    reader = FORMATS.get(str(getattr(method, "value", method)))
    if config is None or reader is None:
        raise CheckpointError(
            "the checkpoint is not quantized, or in a format without a reader",
            value=f"quant_method {method!r}",
            limit=sorted(FORMATS),
            remedy="fp4_inductor.quantize_model quantizes a loaded dense model; other formats: load them with the library that wrote them.",
        )
    reader.check(config)
    return reader


def _names_modelopt(config: Mapping[str, Any]) -> bool:
    producer = config.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"
