"""Everything that needs a GPU, in order: tests, examples, figures. ``python benchmarks/on_gpu.py [--list] [--only STEP ...]``

What could be wrong comes before what could be slow, small kernels before large products (clocks fall behind those). Every step is a
process of its own with a log; a failed one does not stop the others. New rows lie in ``benchmarks/results``; logs and rows together
in ``OUT/on_gpu.tar.gz``, the thing to attach when you measured a GPU we have not. Exit status 1: a step failed.

A GPU machine often has torch and little else. A step whose packages are missing is skipped, a test file whose packages are missing is left
out, and the summary names both and what to install: neither is a failure of what was to be tested.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
WORKERS = ("-n", "6") if importlib.util.find_spec("xdist") else ()  # compilation is most of a test's time; a crash then ends one worker


@dataclass(frozen=True)
class Step:
    """One process.

    Args:
        seconds: what it is expected to take on an H200.
        command: arguments of this Python, or of ``tool``.
        needs: packages without which the step cannot run.
        notes: what the summary says beside the outcome.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    tool: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_missing(module: str) -> bool:
    return importlib.util.find_spec(module) is None


@cache
def imports(file: Path, seen: tuple[Path, ...] = ()) -> frozenset[str]:
    """The packages that ``file`` imports when it is imported, through our own test helpers and conftest.py, too.

    An import inside a function or a ``try`` is not one: the file can be imported without it.
    """
    found: set[str] = set()
    helpers = [folder / "conftest.py" for folder in file.parents if folder.is_relative_to(ROOT / "lowering_tests")]
    for node in ast.parse(file.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            # lowering_tests.folder.helper, or a helper whose folder a conftest.py puts on the path
            beside = [] if "." in name else (ROOT / "lowering_tests").rglob(f"{name}.py")
            ours = [path for path in (ROOT / f"{name.replace('.', '/')}.py", *beside) if path.is_relative_to(ROOT / "lowering_tests") and path.exists()]
            helpers += ours
            if not ours and not name.startswith("lowering_tests"):
                found.add(name.partition(".")[0])
    for helper in helpers:
        if helper.exists() and helper not in (file, *seen):
            found |= imports(helper, (*seen, file))
    return frozenset(found)


def tests() -> Step:
    """The gpu tests of every file that can be imported here; those of the others are named."""
    files = [path for path in sorted((ROOT / "lowering_tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    lacks = {file: tuple(sorted(filter(is_missing, imports(file)))) for file in files}
    run = tuple(str(file.relative_to(ROOT)) for file in files if not lacks[file])
    notes = tuple(f"left out {file.relative_to(ROOT)}: pip install {' '.join(needed)}" for file, needed in lacks.items() if needed)
    return Step("tests", 240, (*PYTEST, *WORKERS, "--durations=10", *run), needs=("pytest",), notes=notes)


TRANSFORMERS = ("transformers",)
STEPS = (
    tests(),
    Step("quickstart", 40, ("examples/quickstart.py", "--device", "cuda"), needs=TRANSFORMERS),
    Step("quickstart-sparse", 40, ("examples/quickstart.py", "--device", "cuda", "--sparse"), needs=TRANSFORMERS),
    Step("generate-moe", 40, ("examples/generate_moe.py", "--device", "cuda"), needs=TRANSFORMERS),
    Step("attention", 60, ("benchmarks/attention.py",)),
    Step("masked-attention", 60, ("benchmarks/masked_attention.py",)),
    Step("cached-attention", 60, ("benchmarks/cached_attention.py",)),
    Step("paged-attention", 60, ("benchmarks/paged_attention.py",)),
    Step("cached-prompt", 200, ("benchmarks/cached_prompt.py",)),
    Step("candidates", 150, ("benchmarks/candidates.py", "--quick")),
    Step("router", 30, ("benchmarks/router.py",)),
    Step("moe", 180, ("benchmarks/moe.py",), needs=TRANSFORMERS),
    Step("many-tokens", 120, ("benchmarks/many_tokens.py",)),
    Step("sparse", 150, ("benchmarks/sparse.py", "timing")),
    Step("dense", 240, ("benchmarks/dense.py",)),
    # 36 layers are compiled anew for each of two kinds of weights, three batch sizes and a prompt; that, not the timing, takes the time.
    # The published figures are those of one mode: a second one would double it.
    Step("decode", 400, ("benchmarks/decode.py", "--modes", "reduce-overhead"), needs=TRANSFORMERS),
    Step("load", 120, ("benchmarks/load.py",), needs=TRANSFORMERS),
    Step("quality-time", 150, ("benchmarks/quality_time.py",), needs=TRANSFORMERS),
    *(
        Step(tool, 60, ("benchmarks/sanitize.py",), ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"))
        for tool in ("memcheck", "racecheck", "initcheck")
    ),
)


def run(step: Step, log: Path, limit: float | None) -> str:
    """``"passed"``, ``"failed (exit status)"`` or why it did not end; the end of the log is printed where it did not pass."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        try:
            command = [*step.tool, sys.executable, *step.command]
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False).returncode
            outcome = f"failed ({status})" if status else "passed"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
        except FileNotFoundError as missing:
            outcome = f"not run: {missing}"
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-3 if outcome == "passed" else -60 :]), flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[s.name for s in STEPS], default=[s.name for s in STEPS], metavar="STEP", help="these steps; default: all")
    parser.add_argument("--budget", type=float, help="seconds: a step that is expected to take longer than what is left is not begun")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "on_gpu", help="folder for logs and the archive (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    args = parser.parse_args()
    if args.list:
        for step in STEPS:
            print(f"{step.name:18} about {step.seconds:4} s   {' '.join((*step.tool, 'python', *step.command))}")
        print(f"{'all':18} about {sum(step.seconds for step in STEPS):4} s")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    start, began = time.monotonic(), time.time()
    outcomes: dict[str, str] = {}
    for step in [s for s in STEPS if s.name in args.only]:
        if missing := [name for name in step.needs if is_missing(name)]:
            outcomes[step.name] = f"skipped: pip install {' '.join(missing)}"
            continue
        left = args.budget - (time.monotonic() - start) if args.budget else None
        if left is not None and left < step.seconds:
            outcomes[step.name] = f"not begun: {left:.0f} s left, about {step.seconds} needed"
            continue
        print(f"--- {step.name}: {' '.join(step.command)}", flush=True)
        at = time.monotonic()
        outcomes[step.name] = "; ".join((f"{run(step, args.out / f'{step.name}.log', left)}, {time.monotonic() - at:.0f} s", *step.notes))
    summary = "\n".join(f"{name:18} {outcome}" for name, outcome in outcomes.items())
    (args.out / "summary.txt").write_text(summary + "\n")
    with tarfile.open(args.out / "on_gpu.tar.gz", "w:gz") as archive:
        for log in [*sorted(args.out.glob("*.log")), args.out / "summary.txt"]:
            archive.add(log, log.name)
        for rows in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
            if rows.stat().st_mtime >= began:
                archive.add(rows, f"results/{rows.name}")
    print(f"\n{summary}\n{args.out / 'on_gpu.tar.gz'}")
    return 0 if all(o.startswith(("passed", "skipped")) for o in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
