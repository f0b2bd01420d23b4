"""torch's compile-cache key, its compile-start callback, and the constant folder's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.compiler.config as compiler_config
from torch._dynamo.callback import callback_handler
from torch._inductor import constant_folding

__all__ = ["keep_dequantized", "key_tag", "on_compile_start", "set_key_tag"]


def key_tag() -> str:
    """The tag that takes part in the keys of all compile caches."""
    return compiler_config.cache_key_tag


def set_key_tag(tag: str) -> None:
    compiler_config.cache_key_tag = tag


def on_compile_start(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when Dynamo starts to compile something, before any cache key is computed."""

    def start(args: Any = None) -> None:
        callback()

    callback_handler.register_start_callback(start)


def keep_dequantized(op: Any) -> None:
    """Keep constant folding (``freezing=True``) from turning ``op(constants)`` into a full-size constant."""
    if op not in constant_folding._dont_constant_fold:
        constant_folding.add_dont_constant_fold(op)
