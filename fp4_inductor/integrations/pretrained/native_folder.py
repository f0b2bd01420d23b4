"""A folder that :func:`fp4_inductor.save` wrote for a transformers model, through ``load_pretrained``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...checkpoint.load import load
from ...decoding.attention import use_attention_backend
from ...decoding.regions import use_regions
from ...errors import ConfigError
from ...models.compile_ahead import compile_ahead
from ...models.coverage import add_notes
from ..transformers import use_experts_backend
from ..whole import prefill_of
from .quantizer import describe_for_saving

_READ = {"dtype", "device_map", "subfolder", "revision", "token", "cache_dir", "local_files_only", "proxies", "force_download"}


def load_native(
    path: Path, auto: Any, config: Any, device: torch.device | None, strict: bool, prefill: str, attention: str, options: Mapping[str, Any]
) -> nn.Module:
    """Build the model of ``config`` and read the folder into it, as :func:`fp4_inductor.load` does.

    Raises:
        ConfigError: an option that has no meaning for such a folder. CheckpointError: as :func:`fp4_inductor.load`.
    """
    unread = sorted(name for name in options if name not in _READ) + (["prefill"] if prefill != "auto" else [])
    unread += ["device_map"] if device is None and options.get("device_map") is not None else []
    if unread:
        raise ConfigError(
            "fp4_inductor.save wrote this folder; these options have no meaning for it",
            value=unread,
            limit="device, dtype, strict, attention, model_class",
            remedy="Leave them out, or save the model with save_pretrained.",
        )
    # An auto class would ask at the terminal whether to run code of the checkpoint; a model class has no such option.
    make = functools.partial(auto.from_config, trust_remote_code=False) if hasattr(auto, "from_config") else auto._from_config
    model = load(lambda: make(config), path, device, strict)
    if options["dtype"] != "auto":
        model.to(getattr(torch, options["dtype"]) if isinstance(options["dtype"], str) else options["dtype"])
    if (path / "generation_config.json").exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    use_experts_backend(model)
    add_notes(model, use_attention_backend(model, attention))
    compile_ahead(model)
    use_regions(model)
    describe_for_saving(model, prefill_of(model), attention)
    return model
