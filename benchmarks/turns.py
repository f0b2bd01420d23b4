"""Trees of this package timed in turns on one machine: what did a change gain, or cost where it should cost nothing?

    python benchmarks/turns.py OLD NEW [NEW ...] [--only dense sparse moe eager model generate] [--rounds 3] [--out CSV]
    python benchmarks/turns.py . . --smoke          # two times this tree, tiny shapes on a CPU: does everything run?

OLD and NEW are folders with an ``fp4_inductor`` in them, and the ``csrc`` that it compiles. Each is imported by a process of its own, which keeps its weights
and what it has compiled; row by row all make themselves ready at once, then take turns (old, new, new, old, ...), and a row's figure is the median of its
turns. Only ``torch.ops.fp4`` and public functions are called, so that all trees can answer. Kernels: cold L2, CUDA-graph replay (``timing.py``). ``eager``:
microseconds of the host for one call of ``fp4.linear``, the GPU not waited for. ``model``: milliseconds of a compiled decode step. ``generate``: milliseconds
of a token of ``fp4_inductor.generate`` over a ``KVCache``. The same seed gives all the same weights; ``sum`` is a checksum of a result, which is equal where
a change leaves the order of sums as it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import copies_for, eager_us, graph_us, machine, save

HERE = Path(__file__).resolve()
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (8192, 8192))  # N, K
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
EXPERTS = {"qwen3_30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336)}  # E, top k, hidden, I
TOKENS = (1, 4, 32, 256, 1024, 4096)
MODELS = (("qwen3-8b", 8, 1), ("qwen3-8b", 8, 8), ("qwen3-8b", 8, 32), ("qwen3-30b", 6, 1))  # shape, layers, batch
LOOPS = (("qwen3-8b", 12, 1), ("qwen3-30b", 12, 1), ("qwen3-8b", 12, 8))
KINDS = ("dense", "sparse", "moe", "eager", "model", "generate")
Row = dict[str, Any]


def rows(kinds: list[str], smoke: bool) -> Iterator[Row]:
    """What is timed. A row is what a worker needs to know."""
    shapes, many, tokens = (((48, 256),), (1, 5), (1, 3)) if smoke else (SHAPES, ROWS, TOKENS)
    for kind in (k for k in ("dense", "sparse") if k in kinds):
        yield from (dict(kind=kind, n=n, k=k, m=m) for n, k in shapes for m in many)
    if "moe" in kinds:
        layers = {"tiny": (4, 2, 64, 64)} if smoke else EXPERTS
        yield from (dict(kind="moe", layer=name, sizes=sizes, m=m) for name, sizes in layers.items() for m in tokens)
    if "eager" in kinds:
        yield from (dict(kind="eager", n=n, k=k, m=m) for n, k in shapes[:2] for m in (1, 8, 64))
    for kind, shapes_of in (("model", MODELS), ("generate", LOOPS)):
        if kind in kinds:
            yield from (dict(kind=kind, layer=name, layers=layers, m=batch) for name, layers, batch in ((("tiny", 1, 1),) if smoke else shapes_of))


# --- the worker: one tree ------------------------------------------------------------------------------------------------


def bytes_of(device: str, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def scales_of(device: str, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, device=device) * 2 + 0.5).to(torch.float8_e4m3fn)


def legal_meta(device: str, *shape: int) -> torch.Tensor:
    """2:4 metadata: of each four two are kept, the first before the second."""
    nibbles = torch.tensor([a | b << 2 for a in range(4) for b in range(a + 1, 4)], dtype=torch.uint8, device=device)
    both = nibbles[torch.randint(0, len(nibbles), (*shape, 2), device=device)]
    return both[..., 0] | both[..., 1] << 4


@functools.lru_cache(maxsize=1)  # of the shape that is timed now
def weights(kind: str, n: int, k: int, device: str) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    g = torch.tensor(0.37, device=device)
    count = copies_for(n * k * 9 // 16) if device == "cuda" else 2
    if kind == "sparse":
        return [(bytes_of(device, n, k // 4), legal_meta(device, n, k // 8), scales_of(device, n, k // 16), g) for _ in range(count)]
    return [(bytes_of(device, n, k // 2), scales_of(device, n, k // 16), g) for _ in range(count)]


def timed(call: Callable[[int], object], copies: int, device: str) -> float:
    return graph_us(call, copies, 9) if device == "cuda" else eager_us(call, copies)


def linear(row: Row, device: str) -> tuple[float, float]:
    kind = "dense" if row["kind"] == "eager" else row["kind"]
    w = weights(kind, row["n"], row["k"], device)
    torch.manual_seed(row["m"])
    x = torch.randn(row["m"], row["k"], device=device, dtype=torch.bfloat16)
    op = torch.ops.fp4.sparse_linear if kind == "sparse" else torch.ops.fp4.linear
    checksum = float(op(x, *w[0]).double().sum())
    if row["kind"] != "eager":
        return timed(lambda i: op(x, *w[i]), len(w), device), checksum
    fastest = math.inf
    for _ in range(30):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            op(x, *w[0])
        fastest = min(fastest, (time.perf_counter() - begin) / 20 * 1e6)
    return fastest, checksum


@functools.lru_cache(maxsize=1)
def experts(sizes: tuple[int, ...], device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    e, _, hidden, inner = sizes
    g = torch.full((e,), 0.01, device=device)
    up = bytes_of(device, e, 2 * inner, hidden // 2), scales_of(device, e, 2 * inner, hidden // 16), g
    return (*up, bytes_of(device, e, hidden, inner // 2), scales_of(device, e, hidden, inner // 16), g)


def moe(row: Row, device: str) -> tuple[float, float]:
    e, top_k, hidden, _ = row["sizes"]
    parts = experts(tuple(row["sizes"]), device)
    torch.manual_seed(row["m"])
    x = torch.randn(row["m"], hidden, device=device, dtype=torch.bfloat16)
    calls = [torch.rand(row["m"], e, device=device).topk(top_k) for _ in range(8 if device == "cuda" else 2)]
    run = lambda i: torch.ops.fp4.moe(x, calls[i].indices, calls[i].values, *parts)  # noqa: E731
    return timed(run, len(calls), device), float(run(0).double().sum())


def context_on(device: str) -> int:
    return 512 if device == "cuda" else 16


def built(name: str, layers: int, device: str) -> Any:
    import decode

    import fp4_inductor

    torch.manual_seed(0)
    net = decode.build(name, layers, device)
    fp4_inductor.quantize_model(net, fp4_inductor.NVFP4Config("amax"), progress=False)
    return net


@functools.lru_cache(maxsize=1)
def step_of(name: str, layers: int, batch: int, device: str) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A compiled step of one token for each sequence, behind ``context_on`` positions; and what goes back there."""
    import decode
    from transformers import StaticCache

    torch._dynamo.reset()
    net, context = built(name, layers, device), context_on(device)
    cache = StaticCache(config=net.config, max_cache_len=context + decode.IN_A_ROW)
    ids, at = torch.randint(0, 200, (batch, 1), device=device), torch.tensor([context], device=device)
    fixed = dict(past_key_values=cache, cache_position=at, position_ids=at[None], use_cache=True, logits_to_keep=1)
    net(input_ids=ids, **fixed)
    forward = torch.compile(net, mode="reduce-overhead" if device == "cuda" else "default", fullgraph=True, dynamic=False)

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(input_ids=ids, **fixed)

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    reset()
    step()
    return step, reset


@torch.inference_mode()
def model(row: Row, device: str) -> tuple[float, float]:
    import decode

    step, reset = step_of(row["layer"], row["layers"], row["m"], device)
    reset()
    checksum = float(step().logits.double().sum())
    return decode.median_ms(step, reset, device, 7, decode.IN_A_ROW if device == "cuda" else 1), checksum


@functools.lru_cache(maxsize=1)
def tokens_of(name: str, layers: int, batch: int, device: str) -> Callable[[int], torch.Tensor]:
    """``run(count)``: so many greedy tokens behind a prompt, compiled."""
    from generate import loop_of

    torch._dynamo.reset()
    net, context = built(name, layers, device), context_on(device)
    ids = torch.randint(0, 200, (batch, context), device=device)
    run = loop_of("kv", net, context + 256, batch, "bf16")
    for count in (1, 3, 3):
        run(ids, count)
    return lambda count: run(ids, count)


def generate(row: Row, device: str) -> tuple[float, float]:
    from generate import seconds

    run, count = tokens_of(row["layer"], row["layers"], row["m"], device), 129 if device == "cuda" else 5
    one, _ = seconds(lambda: run(1), device)
    all_, result = seconds(lambda: run(count), device)
    return (all_ - one) / (count - 1) * 1e3, float(result.sum())


MADE = {"model": step_of, "generate": tokens_of}  # what takes long, ahead of the first turn


def work(device: str) -> None:
    """Answer each line of standard input, a row, with its time and checksum."""
    import fp4_inductor

    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    print(f"a worker of {fp4_inductor.__file__}")
    if device == "cpu":
        torch.set_num_threads(1)
    for line in sys.stdin:
        row = json.loads(line)
        if row.pop("prepare", False):
            answer = (0.0, 0.0)
            if row["kind"] in MADE:
                MADE[row["kind"]](row["layer"], row["layers"], row["m"], device)
        else:
            answer = {"moe": moe, "model": model, "generate": generate}.get(row["kind"], linear)(row, device)
        print(json.dumps(answer), file=answers, flush=True)


# --- the driver ------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, tree: Path, device: str):
        path = os.pathsep.join((str(tree), str(HERE.parent)))
        command = [sys.executable, str(HERE), "--worker", device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tree)

    def begin(self, row: Row) -> None:
        if self.process.stdin is None:
            raise RuntimeError("the worker has no pipes")
        print(json.dumps(row), file=self.process.stdin, flush=True)

    def answer(self, row: Row) -> tuple[float, float]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"a worker ended at {row}: exit code {self.process.wait()}")
        figure, checksum = json.loads(line)
        return figure, checksum


def in_turns(workers: list[Worker], row: Row, rounds: int) -> tuple[list[list[float]], list[float]]:
    """The times and a checksum of each worker. The order alternates: what runs first after a pause is at times slower, whatever it is."""
    for worker in workers:
        worker.begin(row | dict(prepare=True))
    for worker in workers:
        worker.answer(row)
    times: list[list[float]] = [[] for _ in workers]
    sums = [math.nan] * len(workers)
    for turn in range(rounds):
        for i in range(len(workers)) if turn % 2 == 0 else reversed(range(len(workers))):
            workers[i].begin(row)
            figure, sums[i] = workers[i].answer(row)
            times[i].append(figure)
    return times, sums


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="OLD NEW [NEW ...]")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    if len(args.trees) < 2:
        parser.error("two folders or more: OLD NEW ...")
    device = "cpu" if args.smoke else "cuda"
    trees = [tree.absolute() for tree in args.trees]
    workers = [Worker(tree, device) for tree in trees]
    found, logs = [], {}
    for row in rows(args.only, args.smoke):
        times, sums = in_turns(workers, row, args.rounds)
        old, *others = map(median, times)
        what = dict(kind=row["kind"], layer=row.get("layer", ""), n=row.get("n", ""), k=row.get("k", ""), m=row["m"])
        for tree, new, checksum in zip(trees[1:], others, sums[1:], strict=True):
            same = sums[0] == checksum
            logs.setdefault((row["kind"], tree.name), []).append(math.log(new / old))
            figures = dict(tree=tree.name, old=round(old, 3), new=round(new, 3), ratio=round(new / old, 4), sum="equal" if same else "OTHER")
            found.append(dict(machine(), **what, **figures))
            print(
                " ".join(f"{v:>9}" for v in what.values()),
                f"{old:10.3f} {new:10.3f}  {new / old:.3f} {tree.name} {'' if same else 'ANOTHER RESULT'}",
                flush=True,
            )
    for (kind, tree), each in logs.items():
        print(f"{kind} of {tree}: geometric mean {math.exp(sum(each) / len(each)):.4f}, worst {math.exp(max(each)):.3f} of {len(each)} rows")
    save(found, "turns.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
