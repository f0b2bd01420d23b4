"""Memory in which the ranks of a group sum partial results inside a launch (``csrc/common/exchange.cuh``).

It is made when a model is divided among ranks (``integrations/rank_memory.py``), which says so here. Compiled graphs name a group by a number that
its name gives, so that a graph from a compile cache finds the memory of the process that calls it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .errors import DeviceError

MOST_RANKS, SUMS, ROW, SETS, BLOCKS = 8, 2, 16384, 3, 256  # of csrc/common/exchange.cuh


class Exchange(NamedTuple):
    """Of one group. ``addresses``: of each rank's memory, as this rank reaches it. ``memory``: this rank's."""

    addresses: tuple[int, ...]
    rank: int
    memory: Tensor | None


_GROUPS: dict[int, Exchange] = {}
_REASONS: dict[str, str] = {}  # of groups that have none
_listeners: list[Callable[[int, Exchange], None]] = []


def size(ranks: int) -> int:
    """Bytes of each rank's memory."""
    return BLOCKS * 4 + SETS * SUMS * ranks * ROW * 2


def number_of(group: str | int) -> int:
    """By which a compiled graph names a group; 0: none."""
    if isinstance(group, int) or not group:
        return int(group or 0)
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:7], "big") | 1


def of(group: str | int) -> Exchange:
    """The memory of a group.

    Raises:
        DeviceError: this process has none.
    """
    found = _GROUPS.get(number_of(group))
    if found is None:
        raise DeviceError(
            "a compiled graph sums over ranks in memory that this process does not have",
            value=f"group {group}", limit="a group of a model that was divided in this process", remedy="Load the model before the graph is called.",
        )  # fmt: skip
    return found


def numbers() -> list[int]:
    """Of all groups that have memory."""
    return sorted(_GROUPS)


def has(group: str) -> bool:
    return number_of(group) in _GROUPS


def why_not(group: str) -> str:
    """Why a launch cannot sum over the ranks of ``group``; empty: it can."""
    return "" if has(group) else _REASONS.get(group, "the ranks of this group share no memory")


def refuse(group: str, reason: str) -> None:
    """There is none for this group."""
    _REASONS[group] = reason


def add(name: str, exchange: Exchange) -> None:
    """From now on launches find it."""
    _GROUPS[number_of(name)] = exchange
    for tell in _listeners:
        tell(number_of(name), exchange)


def listen(tell: Callable[[int, Exchange], None]) -> None:
    """Call ``tell(number, exchange)`` for each group, those to come included."""
    _listeners.append(tell)
    for number, exchange in _GROUPS.items():
        tell(number, exchange)


def tell(binding: ctypes.CDLL, number: int, exchange: Exchange) -> None:
    """The binding keeps a table of its own."""
    addresses = (ctypes.c_void_p * len(exchange.addresses))(*exchange.addresses)
    binding.fp4_csrc_join(ctypes.c_int64(number), addresses, len(exchange.addresses), exchange.rank)
