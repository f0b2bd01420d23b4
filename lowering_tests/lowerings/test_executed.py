"""Numerics of generated CUDA code without a GPU: compiled models, run in Triton's interpreter in one process of its own (executed_graphs.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_generated_code_computes_what_the_graph_says():
    script = Path(__file__).with_name("executed_graphs.py")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))  # the package may be on the path only
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [c for c in cases if not c["error"] <= c["bound"]]
    kinds = Counter(c["case"].split()[0] for c in cases)
    counts = {"dense": 11, "dynamic": 4, "siblings": 7, "glu": 4, "sparse": 4, "silu": 3, "residual": 3, "w4a4": 5}
    assert counts == {kind: n for kind, n in kinds.items() if kind in counts}
    # A case whose product is left to an operator would prove nothing.
    templates = {c["case"]: c["launched"].count("tem") for c in cases}
    assert {n for case, n in templates.items() if case.startswith("siblings")} == {3}
    assert {case for case, n in templates.items() if n == 0} == {"large bf16 M2100", "w4a4 by hand"}
    alone = [c for c in cases if c["case"].split()[0] in ("dense", "relu", "silu", "residual", "sparse", "glu") and "siblings" not in c["case"]]
    assert {tuple(c["launched"]) for c in alone} == {("tem",)}, "bias, activation, product and residual in one kernel"
