"""Readers of other libraries' checkpoints, one file a format. To add one, write a module as :class:`Format` describes and list it here."""

from __future__ import annotations

from . import compressed_tensors, gguf, gpt_oss, modelopt, native, torchao
from .weight import Format, Found, StoredWeight

FORMATS: dict[str, Format] = {module.METHOD: module for module in (modelopt, compressed_tensors, gpt_oss, torchao, gguf, native)}

__all__ = ["FORMATS", "Format", "Found", "StoredWeight"]
