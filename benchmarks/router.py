"""The router of a mixture of experts in one launch (``cuda_router``) and in two (scores, choice), with the RMSNorm in front of it and without.

    python benchmarks/router.py                          # Qwen3-30B-A3B, gpt-oss-20b, Mixtral, Qwen3-Next; results/router.csv
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
from timing import copies_for, eager_us, graph_us, machine, save

import fp4_inductor
from fp4_inductor.kernels.router import cuda

# Width of a token, experts, and how many of them it goes to.
MODELS = {"qwen3_30b": (2048, 128, 8), "gpt_oss_20b": (2880, 32, 4), "mixtral": (4096, 8, 2), "qwen3_next": (2048, 512, 10)}
TOKENS = (1, 8, 16, 32, 64, 128)
EPS, FORM = 1e-6, "normalized"


def ways_of(model: str, tokens: int, device: str) -> tuple[dict[tuple[str, bool], Callable[[int], object]], int]:
    """(kernel, with a norm?) -> a call with weights number i, and how many weights there are."""
    hidden, experts, k = MODELS[model]
    dtype = torch.bfloat16
    count = copies_for(hidden * experts * 2) if device == "cuda" else 2
    weights = torch.randn(count, experts, hidden, device=device).to(dtype)
    x, norm_weight = torch.randn(tokens, hidden, device=device).to(dtype), torch.ones(hidden, device=device, dtype=dtype)
    rest = (None, k, FORM, dtype)

    def in_two(i: int) -> object:
        with fp4_inductor.dispatch(thresholds={"router": 0}):
            return torch.ops.fp4.router(x, weights[i], *rest)

    def norm_and_two(i: int) -> object:
        with fp4_inductor.dispatch(thresholds={"router": 0}):
            return torch.ops.fp4.norm_router(x, norm_weight, EPS, 0.0, weights[i], *rest)

    ways: dict[tuple[str, bool], Callable[[int], object]] = {("scores + choice", False): in_two, ("scores + choice", True): norm_and_two}
    if device == "cuda" and experts <= 128:
        norm = cuda.Norm(norm_weight, EPS, 0.0)
        ways[cuda.NAME, False] = lambda i: cuda.launch(x, weights[i], *rest)
        ways[cuda.NAME, True] = lambda i: cuda.launch(x, weights[i], *rest, norm=norm)
    return ways, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
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
        hidden, experts, k = MODELS[model]
        ways, count = ways_of(model, tokens, device)
        floor = hidden * experts * 2 / rate_tb_s() / 1e6
        for (kernel, norm), call in ways.items():
            us = time_us(call, count)
            sizes = dict(model=model, hidden=hidden, experts=experts, top_k=k, tokens=tokens, norm=norm)
            rows.append(dict(machine(), **sizes, kernel=kernel, us=round(us, 2), floor_us=round(floor, 2), ratio=round(us / floor, 2)))
            print(f"{model:12} {tokens:4} tokens {'with' if norm else 'without':7} norm {kernel:16} {us:8.2f} us, floor {floor:5.2f}", flush=True)
        del ways
    save(rows, "router.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
