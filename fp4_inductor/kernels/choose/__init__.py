"""Which of the kernels that can serve a call does: a function for each op and family of architectures, read from top to bottom. An op that a family's file has
no function for is chosen as in the next file of :func:`_files`.

Each yields ``(largest M, name of the kernel)`` in ascending order, the last with None: no limit. ``can(name)`` says whether a kernel can
serve the call and is switched on; ``can.ever(name)`` forgets ``DispatchConfig.thresholds``, which do not end a kernel without a limit.
The reasons stand as comments where the choice is made; the figures are in ``benchmarks/results``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from ..kernel import Call
from . import common, cpu, sm80, sm90, sm100

Spans = Iterator[tuple[int | None, str]]


class Can(NamedTuple):
    """The kernels that can serve a call, and which of these ``DispatchConfig.thresholds`` switch off."""

    able: frozenset[str]
    off: frozenset[str]

    def __call__(self, name: str) -> bool:
        return name in self.able and name not in self.off

    def ever(self, name: str) -> bool:
        return name in self.able


def spans(call: Call, can: Can) -> Spans:
    """The choice for ``call``."""
    yield from next(choice for file in _files(call.arch) if (choice := getattr(file, call.op, None)))(call, can)


def place(arch: int) -> str:
    """The file that chooses for ``arch``, for messages."""
    return f"kernels/choose/{_files(arch)[0].__name__.rpartition('.')[2]}.py"


def _files(arch: int) -> tuple[ModuleType, ...]:
    """Those that choose for ``arch``, its own first."""
    return (cpu, common) if arch == 0 else (sm80, common) if arch < 90 else (sm90, common) if arch < 100 else (sm100, sm80, common)
