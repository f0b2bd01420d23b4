"""F4: what is special about a model family. Every module of this folder that has a ``FAMILY`` is one family."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from .family import Experts, Family, Skip, Stack

__all__ = ["Experts", "Family", "Skip", "Stack", "families"]


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family of this folder, by file name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name))
    return tuple(m.FAMILY for m in modules if hasattr(m, "FAMILY"))
