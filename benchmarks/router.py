"""The router of a mixture of experts in one launch (``cuda_router``) and in two (scores, choice), with the RMSNorm in front of it and without.

    python benchmarks/router.py                          # the layers of moe.py; results/router.csv
    python benchmarks/router.py --models qwen3_30b --tokens 8 32
    python benchmarks/router.py --smoke                  # seconds, on a CPU: does everything run?

Cold L2 (weights rotate), CUDA-graph replay, medians. ``floor``: the weight at the rate of a copy on an H200 (4.58 TB/s; on an H100 3.0), without a launch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from cached_attention import rate_tb_s
from moe import LAYERS, Layer
from timing import copies_for, eager_us, graph_us, machine, save

import fp4_inductor
from fp4_inductor.kernels.router import cuda

LAYER_OF = {layer.name: layer for layer in LAYERS}
TOKENS = (1, 8, 16, 32, 64, 128)
EPS, FORM = 1e-6, "normalized"


def ways_of(layer: Layer, tokens: int, device: str) -> tuple[dict[tuple[str, bool], Callable[[int], object]], int]:
    """(kernel, with a norm?) -> a call with weights number i, and how many weights there are. The operators take two launches."""
    made = dict(device=device, dtype=torch.bfloat16)
    count = copies_for(layer.hidden * layer.experts * 2) if device == "cuda" else 2
    weights = [torch.randn(layer.experts, layer.hidden, **made) for _ in range(count)]
    x, norm = torch.randn(tokens, layer.hidden, **made), cuda.Norm(torch.ones(layer.hidden, **made), EPS, 0.0)
    rest = (None, layer.top_k, FORM, torch.bfloat16)
    ways: dict[tuple[str, bool], Callable[[int], object]] = {
        ("scores + choice", False): lambda i: torch.ops.fp4.router(x, weights[i], *rest),
        ("scores + choice", True): lambda i: torch.ops.fp4.norm_router(x, *norm, weights[i], *rest),
    }
    if device == "cuda" and layer.experts <= (cuda.KERNELS[0].most_n or 0):
        ways[cuda.NAME, False] = lambda i: cuda.launch(x, weights[i], *rest)
        ways[cuda.NAME, True] = lambda i: cuda.launch(x, weights[i], *rest, norm=norm)
    return ways, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LAYER_OF, default=list(LAYER_OF))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, time_us = ("cpu", eager_us) if args.smoke else ("cuda", graph_us)
    if args.smoke:
        torch.set_num_threads(1)
        args.models, args.tokens = ["mixtral"], [3]
    rows = []
    for model, tokens in itertools.product(args.models, args.tokens):
        layer = LAYER_OF[model]
        floor = layer.hidden * layer.experts * 2 / rate_tb_s() / 1e6
        ways, count = ways_of(layer, tokens, device)
        for (kernel, norm), call in ways.items():
            with fp4_inductor.dispatch(thresholds={"router": 0}):
                us = time_us(call, count)
            sizes = dict(model=model, hidden=layer.hidden, experts=layer.experts, top_k=layer.top_k, tokens=tokens, norm=norm)
            rows.append(dict(machine(), **sizes, kernel=kernel, us=round(us, 2), floor_us=round(floor, 2), ratio=round(us / floor, 2)))
            print(f"{model:12} {tokens:4} tokens {'with' if norm else 'without':7} norm {kernel:16} {us:8.2f} us, floor {floor:5.2f}", flush=True)
        del ways
    save(rows, "router.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
