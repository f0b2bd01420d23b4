"""Which kernels a call runs, how long each takes and how long none runs, by torch.profiler: what ``--profile`` of the benchmarks prints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

Span = tuple[str, float, float]  # name, begin and end in microseconds


def spans_of(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[Span]:
    """The kernels, copies and fills of one ``call()`` on a GPU, by their begin; replayed graphs included. ``before()`` runs ahead of it, unrecorded."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the first recording pays for the profiler's start
        before()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as recorded:
            call()
            torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda span: span[1])


def idle_us(spans: Iterable[Span]) -> float:
    """Microseconds between the first begin and the last end in which nothing ran; ``spans`` by their begin."""
    idle, last = 0.0, None
    for _, begin, end in spans:
        idle += max(0.0, begin - last) if last is not None else 0.0
        last = end if last is None else max(last, end)
    return idle


def table(spans: list[Span], most: int = 30) -> list[str]:
    """Lines of ``spans`` by name: microseconds together, calls, microseconds of one; the ``most`` expensive, then everything in one line."""
    of: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in spans:
        of[_short(name)].append(end - begin)
    dear = sorted(of.items(), key=lambda item: -sum(item[1]))
    lines = [f"{sum(us):9.1f} us {len(us):5} x {sum(us) / len(us):8.2f}  {name}" for name, us in dear[:most]]
    if not spans:
        return ["no kernel was recorded"]
    whole = max(end for _, _, end in spans) - spans[0][1]
    return [*lines, f"{whole:9.1f} us from the first to the last of {len(spans)} kernels; none ran for {idle_us(spans):.1f}"]


def _short(name: str) -> str:
    return re.sub(r"\(anonymous namespace\)::|void |<.*|\(.*", "", name)[:90] or name[:90]
