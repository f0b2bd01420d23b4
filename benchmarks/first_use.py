"""How long a user waits: the first generate() of a model of Qwen3-8B's size, and the quickstart, with every cache empty.

    python benchmarks/first_use.py                      # what is importable: a wheel, or this checkout
    python benchmarks/first_use.py --package FOLDER     # an unpacked wheel in front of it
    python benchmarks/first_use.py --layers 8           # a smaller model of the same shape
    python benchmarks/first_use.py --device cpu --smoke

Each measurement is a process of its own with caches of its own (Inductor, Triton, CUDA, fp4_inductor). ``process_s`` is from its
start to its end, ``first_generate_s`` the call that a user waits for, ``again_s`` the same call once more. The other columns are
parts of ``first_generate_s``, from torch's own record: Dynamo's tracing, AOTAutograd, Inductor; they nest as their names say.
Weights are random; 16 tokens of prompt, 128 generated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT, TOKENS = 16, 128
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FP4_INDUCTOR_CACHE", "CUDA_CACHE_PATH")
# name -> torch's metric
PARTS = {
    "dynamo_s": "bytecode_tracing",
    "backend_s": "OutputGraph.call_user_compiler",
    "inductor_s": "fx_codegen_and_compile",
    "lowering_s": "GraphLowering.run",
    "codegen_s": "GraphLowering.codegen",
    "kernels_s": "async_compile.wait",
}


def child(args: argparse.Namespace) -> dict:
    """In a process of its own: build, quantize, generate twice."""
    times = {"started": time.time()}
    import torch
    from decode import build

    import fp4_inductor

    times["imported"] = time.time()
    model = build("tiny" if args.smoke else "qwen3-8b", args.layers, args.device)
    if args.device == "cuda":
        torch.cuda.synchronize()
    times["built"] = time.time()
    if args.weights == "nvfp4":
        fp4_inductor.quantize_model(model, progress=False)
        if args.device == "cuda":
            torch.cuda.synchronize()
    times["quantized"] = time.time()
    ids = torch.randint(0, 200, (1, PROMPT), device=args.device)
    options = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, cache_implementation="static")

    def generate() -> list[int]:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()

    first = generate()
    times["first"] = time.time()
    metrics = torch._dynamo.utils.compilation_time_metrics
    parts = {name: round(sum(metrics.get(metric, ())), 1) for name, metric in PARTS.items()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    begin = time.time()
    second = generate()
    marks = list(times)
    return {
        **{f"{mark}_s": round(times[mark] - times[before], 1) for before, mark in itertools.pairwise(marks)},
        "again_s": round(time.time() - begin, 2),
        "graphs": graphs,
        **parts,
        "same": first == second,
        "package": str(Path(fp4_inductor.__file__).parent),
    }


def fresh(command: list[str], args: argparse.Namespace) -> tuple[float, str]:
    """Seconds and output of a process with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        env = {**os.environ, **{name: f"{caches}/{name.lower()}" for name in CACHES}}
        if args.package:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(args.package).absolute()), env.get("PYTHONPATH"))))
        begin = time.time()
        done = subprocess.run([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{command} ended with {done.returncode}\n{done.stdout[-3000:]}")
        return time.time() - begin, done.stdout


def main(args: argparse.Namespace) -> None:
    from timing import machine, save

    here = Path(__file__).parent
    rows = []
    if "generate" in args.what:
        seconds, said = fresh([__file__, "--child", *sys.argv[1:]], args)
        row = json.loads(said.splitlines()[-1])
        rows.append({"what": "generate", **row, "process_s": round(seconds, 1)})
        print(json.dumps(rows[-1], indent=1))
    if "quickstart" in args.what:
        seconds, said = fresh([str(here.parent / "examples" / "quickstart.py"), "--device", args.device], args)
        rows.append({"what": "quickstart", "process_s": round(seconds, 1)})
        print(said[-1500:] if args.verbose else "", json.dumps(rows[-1]))
    columns = dict(weights=args.weights, layers=args.layers or 36, label=args.label, regions=int(os.environ.get("FP4_INDUCTOR_REGIONS", "1")))
    keep = ("what", "process_s", "imported_s", "built_s", "quantized_s", "first_s", "again_s", "graphs", *PARTS)
    rows = [dict(machine(), **columns, **{name: row.get(name, "") for name in keep}) for row in rows]
    save(rows, "first_use.csv", args.out, args.smoke)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["generate", "quickstart"], choices=["generate", "quickstart"])
    parser.add_argument("--package", help="a folder that holds fp4_inductor, put in front of sys.path")
    parser.add_argument("--weights", default="nvfp4", choices=["nvfp4", "bf16"])
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--label", default="", help="how the package was installed, for the table")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--verbose", action="store_true", help="print what the quickstart prints")
    parser.add_argument("--out", type=Path, help="the CSV to write (default: results/first_use.csv)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = arguments()
    if parsed.child:
        print(json.dumps(child(parsed)))
    else:
        main(parsed)
