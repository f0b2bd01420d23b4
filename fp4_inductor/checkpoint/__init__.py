"""F4: readers and writers of quantized checkpoints. The native layout is in :mod:`.manifest`."""

from .load import load
from .save import save

__all__ = ["load", "save"]
