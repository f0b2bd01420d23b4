"""2:4-sparse NVFP4 against dense: time on this GPU, and what it costs a model.

    python benchmarks/sparse.py timing                       fp4.sparse_linear against fp4.linear and bf16 (CUDA)
    python benchmarks/sparse.py quality --model smollm2      perplexity and KL of every pruning, the curve of mixed models
    python benchmarks/sparse.py timing --smoke               seconds, on a CPU: does it run?

``timing`` has the protocol of ``dense.py``: cold L2, CUDA-graph replay, the lower of two medians, sparse, dense and bf16 in one run. ``quality``
evaluates the first windows of a text and calibrates on windows from its middle on; ``--only`` runs some of the rows and leaves
the others in the file, since on a CPU they take minutes each. ``--recovered`` takes a folder that ``examples/recover_sparse.py --save`` wrote.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from timing import copies_for, eager_us, graph_us, lower_of_two, machine, save, write_csv

HERE = Path(__file__).resolve().parent
CURVE = (3.75, 4.0, 4.25)
KEY = ("model", "text", "weights", "bits", "calibration_tokens")


# --- time ---------------------------------------------------------------------------------------------------------


def sparse_weights(n: int, k: int, count: int, device: str):
    """Random 2:4 weights: all six patterns, every code."""
    from fp4_inductor.formats import nvfp4, sparse24

    legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=device)
    nibbles = legal[torch.randint(0, len(legal), (count, n, k // 4), device=device)]
    values = torch.randint(0, 256, (count, n, k // 4), dtype=torch.uint8, device=device)
    scale = (torch.rand(count, n, k // 16, device=device) * 2 + 0.5).to(nvfp4.SCALE_DTYPE)
    return values, sparse24.pack_meta(nibbles), scale, torch.tensor(0.37, device=device)


def reference(x: torch.Tensor, values: torch.Tensor, meta: torch.Tensor, scale: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """float64 ``[M, N]`` of at most 64 rows."""
    from fp4_inductor.formats import sparse24

    return x[:64].double() @ sparse24.dequantize_sparse24(values, meta, scale, g, torch.float32).double().T


def measure(k: int, n: int, m: int, device: str) -> dict:
    """One row: microseconds of the sparse call, of the dense one and of bf16, each on as many copies."""
    from dense import FLOORS

    time_us = graph_us if device == "cuda" else eager_us
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    nbytes = n * k * 7 // 16
    count = (copies_for(nbytes) if m <= 512 else min(copies_for(nbytes), 8)) if device == "cuda" else 2
    sparse_call, wrong = _sparse(x, n, count)
    calls = [sparse_call, _dense(x, n, count)]
    sparse, dense = lower_of_two([functools.partial(time_us, call, count) for call in calls])
    del sparse_call, calls  # and their weights
    w = torch.randn(min(count, copies_for(n * k * 2)), n, k, device=device, dtype=torch.bfloat16)
    bf16 = time_us(lambda i: torch.nn.functional.linear(x, w[i]), len(w))
    figures = {"us": sparse, "dense_us": dense, "bf16_us": bf16, "to_dense": sparse / dense}
    found = dict(machine(), k=k, n=n, m=m, **{name: round(v, 3) for name, v in figures.items()}, error=f"{wrong:.1e}")
    return found | {"floor_ratio": round(sparse / float(np.interp(nbytes, *zip(*FLOORS, strict=True))), 3) if "H200" in found["gpu"] else ""}


def _sparse(x: torch.Tensor, n: int, count: int) -> tuple[Callable[[int], object], float]:
    """The call with the i-th weight, and its relative error against float64."""
    from dense import error, in_a_graph

    *parts, g = sparse_weights(n, x.shape[1], count, x.device.type)
    weights = list(zip(*parts, strict=True))
    wrong = error(in_a_graph(x, weights[0], g, op="sparse_linear"), reference(x, *weights[0], g))
    return lambda i: in_a_graph(x, weights[i], g, op="sparse_linear"), wrong


def _dense(x: torch.Tensor, n: int, count: int) -> Callable[[int], object]:
    from dense import in_a_graph, weights

    q, s, g = weights(n, x.shape[1], count, x.device.type)
    return lambda i: in_a_graph(x, (q[i], s[i]), g)


def time_all(args: argparse.Namespace) -> None:
    from dense import SHAPES

    shapes = ((64, 48), (256, 128)) if args.smoke else SHAPES
    rows = []
    for m in args.m[:2] if args.smoke else args.m:  # few rows of all shapes first: after many, clocks are low for a while
        for k, n in shapes:
            rows.append(measure(k, n, m, args.device))
            r = rows[-1]
            print(f"K={k:5} N={n:5} M={m:5} sparse {r['us']:8.2f} us  dense {r['dense_us']:8.2f}  x{r['to_dense']:.2f}  bf16 {r['bf16_us']:8.2f}", flush=True)
    save(sorted(rows, key=lambda r: (shapes.index((r["k"], r["n"])), r["m"])), "sparse.csv", args.out, args.smoke)


# --- quality ------------------------------------------------------------------------------------------------------


def configurations(calibration: list[torch.Tensor], mixed: str) -> dict[str, object]:
    """name -> config"""
    from fp4_inductor import NVFP4Config, Sparse24Config

    found: dict[str, object] = {"dense": NVFP4Config("activation", calibration=calibration)}
    found["magnitude"] = Sparse24Config("magnitude", accept_loss=True)
    for pruning in ("wanda", "sparsegpt", "admm"):
        found[pruning] = Sparse24Config(pruning, calibration=calibration)
    for bits in CURVE:
        found[f"mixed {bits}"] = Sparse24Config(mixed, calibration=calibration, bits=bits)
    return found


def quality(args: argparse.Namespace) -> None:
    import transformers
    from quality import divergence, log_probabilities, perplexity, texts, windows

    import fp4_inductor

    warnings.filterwarnings("ignore", category=fp4_inductor.errors.QualityWarning)
    from _shared import load_model

    model, tokenizer = load_model(args.model, args.device)
    label = args.name or args.model.rstrip("/").rsplit("/", 1)[-1]
    bodies = {name: text for name, text in texts().items() if name in args.text}
    evaluated = {name: windows(tokenizer, text, 0, args.windows) for name, text in bodies.items()}
    path = HERE / "results" / f"sparse_quality_{label.lower().replace('-', '_')}.csv"
    kept = list(csv.DictReader(path.open())) if path.exists() else []
    for name, text in bodies.items():
        batch = windows(tokenizer, text, len(text) // 2, args.calibration)[:, :-1].to(args.device)
        reference = log_probabilities(model, evaluated[name])
        base = perplexity(reference, evaluated[name])
        rows = []

        def row(weights: str, bits: float, candidate, tokens: int, seconds: float) -> dict:
            log_p = log_probabilities(candidate, evaluated[name])
            ppl = perplexity(log_p, evaluated[name])
            found = {"ppl": ppl, "ratio": ppl / base, "kl": divergence(log_p, reference), "seconds": seconds}
            print(f"{name:18s} {weights:12s} {bits:.3f} bits  ppl {ppl:9.2f}  x{found['ratio']:.3f}  kl {found['kl']:.4f}  {seconds:.0f} s", flush=True)
            common = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__}
            key = {"model": label, "text": name, "weights": weights, "bits": f"{bits:.3f}", "calibration_tokens": tokens}
            return {**common, **key, "tokens": evaluated[name].shape[0] * 512, **{k: f"{v:.5g}" for k, v in found.items()}}

        rows.append(row("bf16", 16.0, model, 0, 0.0))
        for weights, config in configurations(list(batch.split(args.batch)), args.mixed).items():
            if args.only and weights not in args.only:
                continue
            quantized = copy.deepcopy(model)
            start = time.perf_counter()
            fp4_inductor.quantize_model(quantized, config, progress=args.progress)
            seconds = time.perf_counter() - start
            rows.append(row(weights, fp4_inductor.report(quantized).bits_per_weight, quantized, batch.numel() if weights != "magnitude" else 0, seconds))
            kept = merged(kept, rows)
            write_csv(path, kept)
            if args.save:
                fp4_inductor.save(quantized, f"{args.save}/{label}_{name}_{weights.replace(' ', '_')}")
        if args.recovered:
            recovered = fp4_inductor.load(lambda: load_model(args.model, args.device)[0], args.recovered)
            rows.append(row("recovered", fp4_inductor.report(recovered).bits_per_weight, recovered, batch.numel(), 0.0))
        kept = merged(kept, rows)
        write_csv(path, kept)


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """Rows by key, the newest last."""
    rows = {tuple(str(r[k]) for k in KEY): r for r in [*old, *new]}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("timing", "quality"))
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--model", default="smollm2", help="smollm2, austen_dense, a folder, or a hub id")
    parser.add_argument("--name", help="of the model in the table and the file; default: the end of --model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", nargs="+", default=["python_reference"], help="python_reference, northanger_abbey")
    parser.add_argument("--windows", type=int, default=5, help="windows of 512 tokens to evaluate")
    parser.add_argument("--calibration", type=int, default=64, help="windows of 512 tokens to calibrate on")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch of calibration")
    parser.add_argument("--mixed", default="sparsegpt", help="how the sparse layers of mixed models are pruned")
    parser.add_argument("--only", nargs="+", help='rows to run, e.g. dense sparsegpt "mixed 4.0"')
    parser.add_argument("--save", help="folder for the quantized models")
    parser.add_argument("--recovered", help="folder of a recovered model, one more row")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="timing: tiny shapes, also on a CPU: does it run?")
    parser.add_argument("--out", type=Path, help="timing: another CSV file")
    args = parser.parse_args()
    args.device = "cpu" if args.smoke else args.device
    {"timing": time_all, "quality": quality}[args.what](args)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "examples"))
    main()
