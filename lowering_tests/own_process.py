"""Cases that need a process of their own, e.g. because Triton's interpreter is switched on before Triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def cases_of(script: Path) -> list[dict]:
    """Run ``script``, which prints one JSON object per case with its ``error`` and ``bound``; fails if it does, or if an error is above its bound."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))  # the package may be on the path only
    # NumPy's products have the same bits on every processor, and a row of a matrix those of the same row of a shorter one, which Haswell's kernels do not give.
    numpy = {"OPENBLAS_CORETYPE": "Sandybridge"}
    environment = {**os.environ, **numpy, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    cases = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert not [c for c in cases if not c["error"] <= c["bound"]]
    return cases
