"""Attach implementations to ops by dispatch key. CUDA launchers are imported at their first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..ops import dequantize, linear
from .linear import cpu as linear_cpu


def _at_first_call(module: str, name: str) -> Callable:
    def call(*args):
        return getattr(importlib.import_module(module, __package__), name)(*args)

    call.__name__ = name
    return call


linear.CONTRACT.implement("CPU", linear_cpu.linear)
dequantize.CONTRACT.implement("CPU", linear_cpu.dequantize)
linear.CONTRACT.implement("CUDA", _at_first_call(".linear.launch", "linear"))
dequantize.CONTRACT.implement("CUDA", _at_first_call(".dequantize.launch", "dequantize"))
