"""torch's compile-cache keys, its compile-start callback, and the constant folder's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.compiler.config as compiler_config
from torch._dynamo.callback import callback_handler
from torch._inductor import constant_folding
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphModulePass

__all__ = ["in_every_key", "keep_dequantized", "key_tag", "on_compile_start", "set_key_tag"]

_NO_DEVICE = "fp4_inductor"


def key_tag() -> str:
    """The tag that takes part in the keys of all compile caches."""
    return compiler_config.cache_key_tag


def set_key_tag(tag: str) -> None:
    compiler_config.cache_key_tag = tag


class _OnlyAnId(CustomGraphModulePass):
    """A pass for the graphs of a device that does not exist: it is never run, and its id is in every key."""

    def __init__(self, ask: Callable[[], str]):
        self.ask = ask

    def __call__(self, gm: Any) -> None:
        pass

    def uuid(self) -> str:
        return self.ask()


def in_every_key(ask: Callable[[], str]) -> None:
    """Make ``ask()`` a part of each key of the FX-graph cache and the AOTAutograd cache.

    It is asked while the key is made, in the thread and the tracing context of the compilation. The tag is neither: it is set beforehand, for one
    thread from torch 2.13 on, for all before.
    """
    custom_backend_passes[_NO_DEVICE] = _OnlyAnId(ask)


def on_compile_start(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when Dynamo starts to compile something, before any cache key is computed."""

    def start(args: Any = None) -> None:
        callback()

    callback_handler.register_start_callback(start)


def keep_dequantized(op: Any) -> None:
    """Keep constant folding (``freezing=True``) from turning ``op(constants)`` into a full-size constant."""
    if op not in constant_folding._dont_constant_fold:
        constant_folding.add_dont_constant_fold(op)
