"""Writers of other libraries' layouts, one file a format. To add one, write a module with these names and list it here."""

from __future__ import annotations

from types import ModuleType

from . import compressed_tensors, modelopt

LAYOUTS: dict[str, ModuleType] = {module.METHOD: module for module in (modelopt, compressed_tensors)}

__all__ = ["LAYOUTS"]
