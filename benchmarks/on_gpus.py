"""Two GPUs against one: tensor and expert parallelism through vLLM and through Transformers, milliseconds a token and a prompt.

    python benchmarks/on_gpus.py                                         # every part, every model
    python benchmarks/on_gpus.py --list                                  # the engines, in the order in which they are measured
    python benchmarks/on_gpus.py --parts vllm --models 8b --parallel one,tp --budget 480
    python benchmarks/on_gpus.py --parts vllm --models 30b --parallel one,tp,ep --rows decode,64 --at-once
    python benchmarks/on_gpus.py --parts vllm --models 8b --runner v2    # vLLM's second model runner, which has less to do on the host
    python benchmarks/on_gpus.py --parts vllm --models 70b --layers 20   # fewer layers: stands sooner, and its times say less
    python benchmarks/on_gpus.py --parts vllm --models 70b --memory 130 --cache-gib 8   # all layers at once on two H200, rows of up to 20,000 tokens
    python benchmarks/on_gpus.py --parts generate --models 8b --batches 1   # this package's generate(), torchrun, tp_plan="auto"
    python benchmarks/on_gpus.py --smoke                                 # tiny models on a CPU: what runs, not how fast

``vllm``: the engines of a model start together, as many as fit (``--at-once``: of all models), and are asked row by row in turns, as ``serve.py`` does, which says
what a row is. An engine that does not stand after ``--stand`` seconds is measured behind the others, if it stands by then. ``generate``: a model is
written once, read by two ranks and by one, and asked for the same tokens.

Each figure is printed and written as soon as it is there. After ``--budget`` seconds nothing more is begun. ``ratio``: a time over Marlin's, the same GPUs;
``of_one``: one GPU's time with this package over the time. NVLink multicast stays off, in whatever is started here.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import serve

HERE = Path(__file__).parent
OURS = "fp4_inductor"
# A program that uses NVLink multicast can put GPUs that others share out of service. vLLM's sums over symmetric memory ask for it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
MEMORY = 74.0  # GiB of the smallest GPU, an H100
WEIGHTS = {"8b": 7, "30b": 18, "70b": 42, "tiny": 0}  # GiB, of all layers
COLUMNS = ("gpu", "torch", "triton", "vllm", "commit", "date", "model", "parallel", "row", "who", "ms", "ratio", "of_one")
SHAPES = {"8b": "qwen3-8b", "30b": "qwen3-30b", "70b": "70b", "tiny": "tiny"}  # a model of serve.py -> of decode.py
ROWS = {name: row for name, row in serve.ROWS.items() if row[:2] != ("decode", 1) or row[2] == 512}
STARTS = re.compile(
    r"(Loading weights took|Model loading took|Dynamo bytecode transform time|Compiling a graph for compile range .* takes|torch\.compile took"
    r"|profiling/warmup run took|Graph capturing finished in|init engine .* took|compil(?:ing|ed) .* CUDA kernels|compil(?:ing|ed) the binding|a step of one token sums over).*"
)


class Case(NamedTuple):
    """An engine. ``parallel``: ``"one"`` GPU, or two with ``"tp"`` or ``"ep"``."""

    model: str
    parallel: str
    who: str

    def __str__(self) -> str:
        return f"{self.model} {self.parallel} {self.who}"


def cases(args: argparse.Namespace) -> list[Case]:
    """In the order of a row's measurements: what others are compared with comes first."""
    found = []
    for model in args.models:
        for parallel in args.parallel:
            if parallel == "ep" and model != "30b":
                continue
            for who in args.who:
                if parallel != "one" or who == OURS:
                    found.append(Case(model, parallel, who))
    return found


def groups_of(chosen: list[Case], most: float = MEMORY, layers: int = 0, cache: float = 0) -> list[list[Case]]:
    """Those of ``chosen`` that fit on the GPUs together, in their order. ``layers``: 0 is all of them; ``cache``: GiB of keys and values, 0 is what every row needs."""
    groups: list[list[Case]] = []
    for case in chosen:
        if not groups or sum(gib_of(c, layers, cache) for c in [*groups[-1], case]) > most:
            groups.append([])
        groups[-1].append(case)
    return groups


def gib_of(case: Case, layers: int = 0, cache: float = 0) -> float:
    """About what an engine takes of the first GPU: its share of weights and KV cache, and 3 GiB for activations, graphs and the CUDA context."""
    every = serve.LAYERS[case.model]
    whole = WEIGHTS[case.model] * (layers or every) / every + (cache or serve.KV_BYTES[case.model] / serve.GIB)
    return whole / (1 if case.parallel == "one" else 2) + 3


class Sheet:
    """The figures: printed, written, and compared as they come."""

    def __init__(self, path: Path):
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(COLUMNS)
        self.ms: dict[tuple[str, Case], float] = {}

    def write(self, facts: dict[str, str], case: Case, row: str, ms: float) -> None:
        self.ms[row, case] = ms
        marlin, one = self.ms.get((row, case._replace(who="marlin"))), self.ms.get((row, Case(case.model, "one", OURS)))
        ratio = f"{ms / marlin:.3f}" if marlin and case.who != "marlin" else ""
        of_one = f"{one / ms:.3f}" if one and case.parallel != "one" and row != "start" else ""
        known = [facts.get(name, "") for name in COLUMNS[:4]]
        self.writer.writerow([*known, serve.commit(), datetime.date.today().isoformat(), case.model, case.parallel, row, case.who, f"{ms:.3f}", ratio, of_one])
        self.file.flush()
        print(f"{case} {row}: {ms:.3f} ms{ratio and f', {ratio}x Marlin'}{of_one and f', one GPU takes {of_one}x'}", flush=True)


class Engines:
    """Engines of vLLM that start together."""

    def __init__(self, group: list[Case], args: argparse.Namespace, work: Path):
        self.began, self.args = time.monotonic(), args
        self.engines = {case: self._start(case, args, work) for case in group}
        self.ready: dict[Case, dict[str, Any]] = {}
        self.told: set[Case] = set()
        for case in group:
            threading.Thread(target=self._wait_for, args=(case,), daemon=True).start()

    def _start(self, case: Case, args: argparse.Namespace, work: Path) -> serve.Engine:
        two = case.parallel != "one"
        env = {} if args.smoke or two else {"CUDA_VISIBLE_DEVICES": "0"}
        if args.smoke:
            env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return serve.Engine(case.who, case.model, args, work, 2 if two else 1, case.parallel == "ep", env)

    def _wait_for(self, case: Case) -> None:
        self.ready[case] = self.engines[case].read()

    def stand(self, until: float) -> list[Case]:
        """Those that stand and were not returned before, once all do or ``until`` has come; what failed is told, and ended."""
        while len(self.ready) < len(self.engines) and time.monotonic() < until:
            time.sleep(0.2)
        new = [case for case in self.engines if case in self.ready and case not in self.told]
        self.told |= {*new}
        for case in new:
            facts = self.ready[case]
            print(f"{case}: {facts.get('error', 'stands')} after {time.monotonic() - self.began:.0f} s or less", flush=True)
            self.tell_start(case)
        return [case for case in new if "error" not in self.ready[case]]

    def late(self) -> list[Case]:
        return [case for case in self.engines if case not in self.told]

    def tell_start(self, case: Case) -> None:
        """What vLLM and this package said about the time of a start, of the first rank."""
        for line in self.engines[case].log.read_text(errors="replace").splitlines():
            if "TP1" not in line and "EP1" not in line and (said := STARTS.search(line)):
                print(f"  {case} | {line[line.find('INFO ') + 5 :][:14] if 'INFO ' in line else ''} {said[0][:140]}", flush=True)

    def close(self) -> None:
        for engine in self.engines.values():
            if engine.process.poll() is None and engine.process.stdin is not None:
                engine.process.terminate()
        for engine in self.engines.values():
            engine.close()


def measure_engines(args: argparse.Namespace, sheet: Sheet, end: float, work: Path) -> None:
    table = serve.SMOKE if args.smoke else ROWS
    rows = [name for name, (kind, number, _) in table.items() if not args.rows or {kind, str(number), name} & {*args.rows}]
    chosen = cases(args)
    models = [args.models] if args.at_once else [[model] for model in args.models]
    for group in [group for together in models for group in groups_of([c for c in chosen if c.model in together], args.memory, args.layers, args.cache_gib)]:
        if time.monotonic() > end:
            print(f"not begun, no time is left: {', '.join(map(str, group))}", flush=True)
            continue
        engines = Engines(group, args, work)
        try:
            standing = engines.stand(min(end, engines.began + args.stand))
            while standing or engines.late():
                ask(engines, standing, rows, sheet, end)
                if time.monotonic() > end or not engines.late():
                    break
                standing = engines.stand(end)
            for case in engines.late():
                print(f"{case}: does not stand after {time.monotonic() - engines.began:.0f} s", flush=True)
                engines.tell_start(case)
        finally:
            engines.close()


def ask(engines: Engines, standing: list[Case], rows: list[str], sheet: Sheet, end: float) -> None:
    for name in rows:
        for case in standing:
            if time.monotonic() > end:
                return
            facts = engines.ready[case]
            found = {"ms": facts["ready"]} if name == "start" else engines.engines[case].send(name)
            if "error" in found:
                print(f"{case} {name}: {found['error']}", flush=True)
            else:
                sheet.write(facts, case, name if name == "start" else serve.named(name, engines.args), found["ms"])


def measure_generate(args: argparse.Namespace, sheet: Sheet, end: float, work: Path) -> int:
    """The number of calls that give something else on two ranks, and of models that failed."""
    import torch
    from timing import machine

    facts = {name: str(value) for name, value in machine().items()}
    sizes = ["--context", "16", "--new", "6", "--rounds", "1", "--batch", "2", "--float32"] if args.smoke else ["--batch", *args.batches]
    failed = 0
    for model in args.models:
        if time.monotonic() > end:
            print(f"generate {model}: not begun, no time is left", flush=True)
            continue
        folder, two, one = (work / f"{model}-{part}" for part in ("written", "two.json", "one.json"))
        layers = args.layers or 4
        script = [str(HERE / "ranks.py"), str(folder)]
        wrote = run_until(end, [sys.executable, *script, "--write", SHAPES[model], "--layers", str(layers)])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        more = ["--one-shot"] if args.one_shot else []
        ran = wrote and run_until(end, [*torchrun, *script, "--out", str(two), *sizes, *more])
        ran = ran and run_until(end, [sys.executable, *script, "--out", str(one), *sizes, "--follow", str(two), *(["--eager"] if args.smoke else [])])
        found = {parallel: json.loads(path.read_text()) if path.exists() else {} for parallel, path in (("one", one), ("tp", two))}
        gaps = json.loads(one.with_suffix(".gaps").read_text()) if one.with_suffix(".gaps").exists() else {}
        for batch in found["tp"]:
            for parallel in ("one", "tp"):
                if batch in found[parallel]:
                    sheet.write(
                        facts,
                        Case(model, parallel, OURS),
                        f"generate() batch {batch} context {'16' if args.smoke else '512'} x{layers} layers",
                        found[parallel][batch]["ms"],
                    )
            failed += tell_tokens(model, batch, found, gaps)
            for note in found["tp"][batch]["notes"]:
                print(f"generate {model} tp: {note}", flush=True)
        failed += not ran
    if not torch.cuda.is_available() and not args.smoke:
        print("no GPU: the figures are a CPU's", flush=True)
    return failed


def tell_tokens(model: str, batch: str, found: dict[str, Any], gaps: dict[str, float]) -> int:
    """1 if two ranks compute something else than one GPU: other logits, not only another token where two are nearly as likely."""
    if batch not in found["one"] or "logits" not in gaps:
        return 1
    pairs = list(zip(found["one"][batch]["tokens"], found["tp"][batch]["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    parted = "" if same == len(pairs) else f"; where others part, the token of two ranks is at most {gaps[batch]:.3f} standard deviations below the first"
    wrong = gaps["logits"] > MOST
    print(
        f"generate {model} batch {batch}: {same} of {len(pairs)} rows have the tokens of one GPU{parted}; "
        f"logits of a prompt differ by {gaps['logits']:.4f} of their norm{f': WRONG, the limit is {MOST}' if wrong else ''}",
        flush=True,
    )
    return int(wrong)


# Of the norm of the logits. Sums in another order move them by a hundredth in bfloat16. Prompts in FP8 have a scale for each row of a rank's part of an
# activation, which moves them by several. Without one sum they have little in common.
MOST = 0.2


def run_until(end: float, command: list[str]) -> bool:
    try:
        return subprocess.run(command, timeout=max(end - time.monotonic(), 1), check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"ended, no time is left: {' '.join(command[1:4])}", flush=True)
        return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def why_not(part: str, smoke: bool) -> str:
    """Why a part cannot run here."""
    if part == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    import torch

    if not smoke and torch.cuda.device_count() < 2:
        return f"{torch.cuda.device_count()} GPU(s), two are needed"
    return ""


def main() -> int:
    def names(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names, default=["vllm", "generate"], help="vllm, generate")
    parser.add_argument("--models", type=names, default=["8b", "30b", "70b"])
    parser.add_argument("--parallel", type=names, default=["one", "tp", "ep"], help="one, tp, ep")
    parser.add_argument("--who", type=names, default=["marlin", OURS], help=f"marlin, {OURS}")
    parser.add_argument("--rows", type=names, default=[], help="kinds (start, decode, prompt, throughput), batches, or whole names; default: all")
    parser.add_argument("--layers", type=int, default=0, help="default: all of them; 4 of generate")
    parser.add_argument("--at-once", action="store_true", help="start engines of several models together")
    parser.add_argument("--memory", type=float, default=MEMORY, help="GiB of a GPU that engines which start together may take: 130 on an H200")
    parser.add_argument("--stand", type=float, default=300, help="seconds after which engines that do not stand yet are left for later")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which nothing more is begun")
    parser.add_argument("--batches", type=names, default=["1", "8", "32"], help="of generate; each is compiled anew")
    parser.add_argument("--one-shot", action="store_true", help="of generate: small sums by one_shot_all_reduce over symmetric memory instead of NCCL")
    parser.add_argument("--out", type=Path, default=Path("on_gpus.csv"))
    parser.add_argument("--logs", default=".", help="folder of the engines' logs")
    parser.add_argument("--additional", default="", help="JSON for the plugin")
    serve.add_options(parser)
    parser.add_argument("--eager", action="store_true", help="nothing is compiled, in vLLM")
    parser.add_argument("--list", action="store_true", help="the engines, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU")
    args = parser.parse_args()
    os.environ.update(NO_MULTICAST)
    if args.smoke:
        args.models, args.layers, args.who = ["tiny"], args.layers or 1, [OURS]
    if args.list:
        print(*cases(args), sep="\n")
        return 0
    end, failed = time.monotonic() + args.budget, 0
    sheet = Sheet(args.out)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for part in args.parts:
            if reason := why_not(part, args.smoke):
                print(f"{part}: not run: {reason}", flush=True)
                failed += not args.smoke
            elif part == "vllm":
                measure_engines(args, sheet, end, Path(work))
            else:
                failed += measure_generate(args, sheet, end, Path(work))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
