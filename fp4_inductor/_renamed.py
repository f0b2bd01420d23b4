"""Options that got another name. Whoever passes the old one gets a DeprecationWarning; files that have it are read without one.

This module alone knows the old names. A function takes them by :func:`takes_old_names`, a class by :func:`has_old_names`, a reader of files calls
:func:`current`, and a parser of other input (a command line, a dictionary of settings) calls :func:`replaced`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import ConfigError

OLD_NAMES = {"large_m": "prefill"}

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """``stored``, read from a file or a pickle, under today's names. An entry that has both names is left for its reader to refuse."""
    return {OLD_NAMES[name] if name in OLD_NAMES and OLD_NAMES[name] not in stored else name: value for name, value in stored.items()}


def replaced(
    options: Mapping[str, Any], where: str, also: Collection[str] = (), spelled: Callable[[str], str] = str, warn: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """``options``, as a user gave them, under today's names, with a warning for each old one.

    Args:
        options: by name.
        where: what took them, for messages.
        also: further options that were given, for example by position.
        spelled: how ``where`` spells an option's name.
        warn: gets the message; None: it becomes a DeprecationWarning at the line that called the caller's caller.

    Raises:
        ConfigError: an option is given under both names.
    """
    for old, new in OLD_NAMES.items():
        if old not in options:
            continue
        before, now = spelled(old), spelled(new)
        if new in options or new in also:
            raise ConfigError(
                f"{where}: {before} and {now} are one option",
                value=f"{before}={options[old]!r} and {now}" + (f"={options[new]!r}" if new in options else ""),
                limit=now,
                remedy=f"Leave out {before}, the old name.",
            )
        message = f"{where}: {before} is called {now} now; the old name will be removed."
        if warn is None:
            warnings.warn(message, DeprecationWarning, stacklevel=4)
        else:
            warn(message)
    return current(options)


def takes_old_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that also takes its keyword arguments under their old names."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(*args, **(kwargs if OLD_NAMES.keys().isdisjoint(kwargs) else _renamed(function, args, kwargs)))  # type: ignore[arg-type]

    return call


def has_old_names(cls: _C) -> _C:
    """A class whose constructor takes old names, whose pickles may hold them, and whose attributes answer to them."""
    own = cls.__dict__.get("__init__")
    if own is not None:
        cls.__init__ = takes_old_names(own)  # type: ignore[misc]
    set_state = getattr(cls, "__setstate__", None) or (lambda self, state: self.__dict__.update(state))
    cls.__setstate__ = lambda self, state: set_state(self, current(state))  # type: ignore[attr-defined]
    for old, new in OLD_NAMES.items():
        setattr(cls, old, _old_attribute(old, new))
    return cls


def _renamed(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    where = function.__qualname__.removesuffix(".__init__")
    return replaced(kwargs, where, also=inspect.signature(function).bind_partial(*args).arguments)


def _old_attribute(old: str, new: str) -> property:
    def warn(self: Any) -> None:
        warnings.warn(f"{type(self).__name__}.{old} is called {new} now; the old name will be removed.", DeprecationWarning, stacklevel=3)

    def read(self: Any) -> Any:
        warn(self)
        return getattr(self, new)

    def write(self: Any, value: Any) -> None:
        warn(self)
        setattr(self, new, value)

    return property(read, write)
