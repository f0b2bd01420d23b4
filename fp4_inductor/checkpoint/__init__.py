"""F4: readers and writers of quantized checkpoints. ``native``: this package's own safetensors layout."""

from __future__ import annotations

__all__ = ["load", "save"]


def save(model, dir, max_shard_size="5GB"):
    from .native import save as f

    return f(model, dir, max_shard_size)


def load(model_or_factory, dir, device=None, strict=True):
    from .native import load as f

    return f(model_or_factory, dir, device, strict)
