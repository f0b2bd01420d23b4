"""Tokens on their way to the host: copied into pinned memory behind the steps that made them, looked at when a later block runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._replay import Host


@dataclass
class Look:
    """What the host sees of the device after a block of steps.

    Attributes:
        end: tokens of each row that were made so far; with prompt lookup, how many there can be at most.
        length: of these, how many belong to the result: fewer than ``end`` if all rows had ended before.
        done: have all rows ended?
        bad: number of the token, from 1, whose logits had no finite largest score; 0: none.
        steps, drafted: of prompt lookup: steps until the row ended, and tokens drafted in them.
    """

    end: int
    length: int
    done: bool
    bad: int
    steps: int = 0
    drafted: int = 0


class Mail:
    """Blocks of tokens on their way to the host, oldest first.

    Args:
        device: allocates pinned memory and marks places in the queue of the device.
        tokens: int64 ``[most, B]`` on the device; a block is some of its rows.
        status: int64 on the device: length, all ended, bad, and what else a :class:`Look` has.
    """

    def __init__(self, device: Host, tokens: Tensor, status: Tensor):
        self.device, self.tokens, self.status = device, tokens, status
        self.arrived = device.pinned(tokens.shape, tokens.dtype)
        self._slots = [device.pinned(status.shape, status.dtype) for _ in range(device.ahead + 1)]
        self._under_way: deque[tuple[int, Tensor, Any]] = deque()
        self._sent = 0

    def restart(self) -> None:
        """Forget what is under way; the next block begins with token 0."""
        self._under_way.clear()
        self._sent = 0

    def post(self, end: int, begin: int | None = None) -> None:
        """Copy the tokens from ``begin`` (None: those that were not sent yet) up to ``end``, and the status, behind the work that was queued so far."""
        self._sent = self._sent if begin is None else begin
        slot = self._slots.pop(0)
        self._slots.append(slot)
        self.arrived[self._sent : end].copy_(self.tokens[self._sent : end], non_blocking=True)
        slot.copy_(self.status, non_blocking=True)
        self._under_way.append((end, slot, self.device.mark()))
        self._sent = end

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def take(self) -> Look:
        """Wait for the oldest block."""
        end, slot, mark = self._under_way.popleft()
        mark.synchronize()
        length, done, bad, *more = slot.tolist()
        return Look(end, length, bool(done), bad, *more)


class Outlet:
    """Hands tokens to a streamer of Transformers, in order, each token of the result once."""

    def __init__(self, streamer: Any, mail: Mail):
        self.streamer, self.mail = streamer, mail
        self.given = 0
        self.failed = False

    def give(self, upto: int) -> None:
        """``streamer.put`` for each token up to ``upto``: int64 ``[B]`` on the CPU."""
        if self.streamer is None:
            return
        for i in range(self.given, upto):
            self.given = i + 1
            self._call(self.streamer.put, self.mail.arrived[i].clone())

    def end(self) -> None:
        """``streamer.end``, once; not after the streamer itself has raised."""
        if self.streamer is not None and not self.failed:
            streamer, self.streamer = self.streamer, None
            streamer.end()

    def _call(self, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException:
            self.failed = True
            raise
