"""How long ``quantize_model`` takes by each search for scales, and how much memory: a model of random weights on one GPU.

    python benchmarks/quality_time.py                                  # Qwen3-8B's size, scale_search="gptq"
    python benchmarks/quality_time.py --model qwen3-30b --layers 4     # four layers of a mixture of experts
    python benchmarks/quality_time.py --weights auto activation gptq
    python benchmarks/quality_time.py --smoke                          # a tiny model on a CPU: what runs, not how fast

Seconds of a call, and of its parts: ``text`` the model writes its own, ``means`` E[x^2] of every input, ``fisher`` the backward pass, ``rounding`` second
moments and the rounding of every weight, ``kl`` the report's figures on text that was held out. GiB: of the dense model, and at most during the call;
printed for each part too.
Times of random weights are those of real ones: no loop ends early but the refinement's, which random weights keep going.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode import MODELS, build
from timing import machine, save

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.models import gptq, scale_choice

GIB = 1 << 30
PARTS: dict[str, list[tuple[Any, str]]] = {
    "text": [(gptq, "text")],
    "means": [(gptq, "statistics"), (scale_choice, "statistics")],
    "fisher": [(gptq, "fisher")],
    "rounding": [(gptq, "prepare")],
    "kl": [(scale_choice, "_kl"), (scale_choice, "_predicted")],
}


@contextmanager
def watched(seconds: dict[str, float], peaks: dict[str, float], cuda: bool) -> Iterator[None]:
    """While active, seconds and the most GiB go to the part of ``PARTS`` that runs, the innermost; to ``"else"`` outside of them."""
    parts, last = ["else"], [time.monotonic()]

    def look() -> None:
        """What happened since the last look belongs to the part that runs."""
        if cuda:
            torch.cuda.synchronize()
            peaks[parts[-1]] = max(peaks.get(parts[-1], 0.0), torch.cuda.max_memory_allocated() / GIB)
            torch.cuda.reset_peak_memory_stats()
        now = time.monotonic()
        seconds[parts[-1]] = seconds.get(parts[-1], 0.0) + now - last[0]
        last[0] = now

    def wrapped(part: str, call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            look()
            parts.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                look()
                parts.pop()

        return run

    with ExitStack() as stack:
        for part, places in PARTS.items():
            for module, name in places:
                stack.enter_context(patch.object(module, name, wrapped(part, getattr(module, name))))
        yield
    look()


def measure(args: argparse.Namespace, weights: str) -> dict[str, Any]:
    cuda = not args.smoke
    torch.manual_seed(0)
    model = build(args.model, args.layers, "cuda" if cuda else "cpu")
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    dense = torch.cuda.memory_allocated() if cuda else 0
    config = NVFP4Config(weights, calibration="self" if weights == "activation" else None)
    seconds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    with watched(seconds, peaks, cuda):
        fp4_inductor.quantize_model(model, config, progress=args.progress)
    for note in fp4_inductor.report(model).notes:
        print("  ", note)
    row = {
        **machine(),
        "model": args.model,
        "layers": args.layers or MODELS[args.model][1],
        "weights": weights,
        "seconds": f"{sum(seconds.values()):.1f}",
        **{part: f"{seconds.get(part, 0.0):.1f}" for part in PARTS},
        "dense_gib": f"{dense / GIB:.1f}",
        "peak_gib": f"{max(peaks.values()):.1f}" if cuda else "",
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    print("GiB at most:", ", ".join(f"{part} {value:.1f}" for part, value in peaks.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--weights", nargs="+", default=["gptq"])
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        args.model = "tiny"
    rows = []
    for weights in args.weights:
        rows.append(measure(args, weights))
        save(rows, "quality_time.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
