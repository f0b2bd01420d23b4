"""Libraries that are compiled in the background, several at a time, while the caller does something else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from .. import _notice

SECONDS = 15  # of one library on one core: 5 to 20
_CORES = len(os.sched_getaffinity(0))
_free_core = threading.Semaphore(_CORES)


@dataclass(frozen=True)
class Compilation:
    """How one library is made.

    Args:
        ready: returns its path if nothing has to be compiled, else None; raises what prevents compiling it.
        compile: returns its path; raises what prevents it.
    """

    ready: Callable[[], Path | None]
    compile: Callable[[], Path]


class Background:
    """Libraries by key, each compiled once. Threads do not survive a fork: a child compiles what was not finished again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Path]] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        global _free_core
        self._lock, _free_core = threading.Lock(), threading.Semaphore(_CORES)
        self._made = {key: future for key, future in self._made.items() if future.done()}

    def start(self, wanted: Mapping[Hashable, Compilation], what: str) -> None:
        """Begin to compile those that nobody has begun, and say so in one line; ``{}`` in ``what`` stands for how many they are."""
        with self._lock:
            new = {key: made for key, made in wanted.items() if key not in self._made}
            futures: dict[Hashable, Future[Path]] = {key: Future() for key in new}
            self._made |= futures
        jobs = {}
        for key, made in new.items():
            try:
                path = made.ready()
            except Exception as error:  # there is no compiler, or no folder to write to: whoever asks for the library is told
                futures[key].set_exception(error)
                continue
            if path is None:
                jobs[futures[key]] = made.compile
            else:
                futures[key].set_result(path)
        if jobs:
            _compile_all(jobs, what.format(len(jobs)))

    def result(self, key: Hashable) -> Path:
        """The library, once it is there; raises what prevented it. Somebody must have begun it."""
        with self._lock:
            future = self._made[key]
        return future.result()

    def error(self, key: Hashable) -> BaseException | None:
        """What prevented it, as far as is known without waiting."""
        with self._lock:
            future = self._made[key]
        return future.exception() if future.done() else None


def _compile_all(jobs: Mapping[Future[Path], Callable[[], Path]], what: str) -> None:
    seconds = SECONDS * -(-len(jobs) // _CORES)
    _notice.say(f"compiling {what}, once for this machine, about {seconds} s")
    begin, left, lock = time.monotonic(), len(jobs), threading.Lock()

    def run(future: Future[Path], compile_: Callable[[], Path]) -> None:
        nonlocal left
        with _free_core:
            try:
                future.set_result(compile_())
            except BaseException as error:  # the thread that waits for the library raises it
                future.set_exception(error)
        with lock:
            left -= 1
            last = left == 0
        if last:
            _notice.say(f"compiled {what} in {time.monotonic() - begin:.0f} s")

    for job in jobs.items():
        # Daemon threads: a program that ends does not wait for them (build.py stops their compilers).
        threading.Thread(target=run, args=job, name=f"fp4_inductor: {what}", daemon=True).start()
