"""Time, machine and files of every benchmark. On a GPU with a cold L2: rotate over weight copies larger than the cache, replay a CUDA graph, take the median.

Protocol: copies together hold more than 256 MB, one graph holds one call per copy, medians over
replays; ratios are only formed between figures of one run on one machine.
"""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

WARM_SECONDS = 0.02
RESULTS = Path(__file__).parent / "results"


def copies_for(bytes_each: int, total: int = 512 << 20) -> int:
    """How many weight copies make one pass larger than any L2."""
    return max(4, -(-total // max(bytes_each, 1)))


def graph_us(call: Callable[[int], object], copies: int, replays: int = 15) -> float:
    """Median microseconds of ``call(i)``, i running over ``copies``, replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(3, copies)):
            call(i)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(copies):
                call(i)
        warm = time.perf_counter() + WARM_SECONDS  # clocks rise; what ran before may have lowered them
        while time.perf_counter() < warm:
            graph.replay()
            stream.synchronize()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[len(times) // 2]


def lower_of_two(timings: Sequence[Callable[[], float]]) -> list[float]:
    """The lower of two figures of each, taken from the first to the last and back: what is timed first after a pause is at times 7% slower, whatever it is."""
    there = [timing() for timing in timings]
    back = [timing() for timing in reversed(timings)]
    return list(map(min, there, reversed(back)))


def eager_us(call: Callable[[int], object], copies: int, replays: int = 3) -> float:
    """Median microseconds of ``call(i)`` on a CPU; for smoke runs and orders of magnitude."""
    call(0)
    times = []
    for _ in range(replays):
        start = time.perf_counter()
        for i in range(copies):
            call(i)
        times.append((time.perf_counter() - start) * 1e6 / copies)
    return sorted(times)[len(times) // 2]


def machine() -> dict[str, str]:
    """Columns that say where and with what a figure was measured."""
    import triton

    commit = os.environ.get("FP4_COMMIT", "")  # a machine without the repository's history is told
    try:
        commit = (
            commit
            or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
        )
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def read_csv(path: Path) -> list[dict]:
    """The rows of ``path``, empty if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write ``rows`` (one dict a line, the first one's keys are the header)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def save(rows: list[dict], name: str, out: Path | None, smoke: bool) -> None:
    """Write ``rows`` to ``out``, else to ``results/<name>``; there nothing of a smoke run, whose figures mean nothing."""
    if out or not smoke:
        write_csv(out or RESULTS / name, rows)
