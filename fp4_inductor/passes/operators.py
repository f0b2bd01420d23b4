"""What other libraries call as one operator, which is not decomposed when the passes run. Imports nothing, so that a plugin can add names early.

norm(x, weight, eps, ...) -> y            weight may be None; further arguments, if they are there, are None
add_norm(x, residual, weight, eps, ...) -> (norm(x + residual), x + residual)
sum(x, group) -> y                        over the ranks of a group, by the name that the library gives it
"""

from __future__ import annotations

from collections.abc import Callable

NORMS: set[str] = set()
ADD_NORMS: dict[str, str] = {}  # and the norm alone
SUMS: dict[str, Callable[[str], str]] = {}  # and torch's name of a group, from the library's


def add_norms(norm: str, add_norm: str) -> None:
    """``norm``, ``add_norm``: names of operators, as ``OpOverload.name()`` gives them. May be called again."""
    NORMS.add(norm)
    ADD_NORMS[add_norm] = norm


def add_sum(name: str, group: Callable[[str], str]) -> None:
    """``name``: of an operator, as above. ``group``: gives torch's name of a group of that library's; empty: it has none. May be called again."""
    SUMS[name] = group


def name_of(target: object) -> str:
    """Of an operator that a graph calls; empty for another function."""
    name = getattr(target, "name", None)
    return name() if callable(name) else ""
