"""A step that runs again and again, and what its loop asks of a device beside tensor operations.

``Cuda`` holds all that is specific to CUDA; ``Host`` is a CPU, and what tests stand in for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import UnsupportedOpError


class Replayable(Protocol):
    def replay(self) -> None: ...


class _Now:
    """A mark behind work that is done already."""

    def synchronize(self) -> None:
        pass


class Host:
    """A device that has done what it was told when the call returns.

    Attributes:
        ahead: blocks of steps that are queued before the host waits for the oldest.
        captures: can it capture a step and replay it?
    """

    ahead = 0
    captures = False

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can write into while the host goes on."""
        return torch.empty(shape, dtype=dtype)

    def mark(self) -> Any:
        """Something whose ``synchronize()`` waits for the work that is queued now, and for no later work."""
        return _Now()

    def aside(self, step: Callable[[], None]) -> None:
        """Run ``step`` as it has to run before it is captured."""
        step()

    def capture(self, step: Callable[[], None]) -> Replayable:
        """Record what ``step`` does to the device without doing it."""
        raise UnsupportedOpError("this device captures no steps", value=type(self).__name__, limit="a CUDA device", remedy="Run the step as it is.")

    def wait(self) -> None:
        """Wait for everything that is queued."""


class Cuda(Host):
    """One CUDA device, its current stream and a stream on which steps are captured, all of them with one pool of memory: no two of them run at once."""

    ahead = 1
    captures = True

    def __init__(self, device: torch.device):
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def aside(self, step: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def capture(self, step: Callable[[], None]) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do with CUDA, a streamer's reader or a compilation in the background, does not end the capture.
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                step()
        except BaseException:
            # A capture that fails leaves the device's generator waiting for its end, so that nothing could be drawn any more (torch 2.11 to 2.13).
            with torch.cuda.device(self.device):
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            self._pool = torch.cuda.graph_pool_handle()  # torch may still count the old one as that of a capture under way, and refuse it
            raise
        return graph

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: a dead CUDA graph in a cycle would be destroyed, which ends a capture that is under way."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def device_for(device: torch.device) -> Host:
    return Cuda(device) if device.type == "cuda" else Host()


class Runner:
    """Runs one step again and again. Where the device captures, the first ``warm`` runs are plain, one is captured, and all later ones are replays.

    Every run is a step of the loop: none is thrown away. Three come before the capture, because a Python number that changes from step to step (the
    length of a sliding layer) is compiled as a constant first and as a variable second, and nothing may be compiled during a capture.
    """

    WARM = 3

    def __init__(
        self,
        device: Host,
        step: Callable[[], None],
        after_replay: Callable[[], None],
        keep: Callable[[], Callable[[], None]],
        name: str = "the step",
        warm: int = WARM,
    ):
        """``after_replay`` counts on the host what a step counts there; ``keep`` returns a function that sets these counts back. ``name``: in notes."""
        self.device, self.step, self.after_replay, self.keep, self.name, self.warm = device, step, after_replay, keep, name, warm
        self.captures = device.captures
        self.graph: Replayable | None = None
        self.note: str | None = None
        self.runs = 0

    def __call__(self) -> str:
        """Run the step; ``"run"``, ``"capture"`` or ``"replay"``: how."""
        if self.graph is not None:
            self.graph.replay()
            self.after_replay()  # a replay runs no Python
            return "replay"
        if not self.captures:
            self.step()
            return "run"
        if self.runs < self.warm:
            self.device.aside(self.step)
            self.runs += 1
            return "run"
        restore = self.keep()
        try:
            graph = self.device.capture(self.step)
        except RuntimeError as error:  # the step reads something on the host
            restore()
            self.captures = False
            self.note = f"{self.name} is not captured: {str(error).strip().splitlines()[0]}"
            self.step()
            return "run"
        self.graph = graph
        graph.replay()
        return "capture"
