"""Numerics of the Triton kernels without a GPU: Triton's interpreter, in one process of its own (interpreted.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")


SPARSE = {"sparse_gemv": 31, "sparse_mid": 21, "sparse_dequantize": 8, "sparse_decompress": 1, "sparse_dequantize_fp8": 1}


def test_triton_kernels_in_the_interpreter():
    script = Path(__file__).with_name("interpreted.py")
    root = str(Path(__file__).parents[2])  # the package may be on the path only
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [c for c in cases if not c["error"] <= c["bound"]]
    kinds = Counter(c["case"].split()[0] for c in cases)
    assert kinds == {"gemv": 66, "mid": 28, "siblings": 9, "glu": 16, "fp8_gemv": 6, "dequantize": 11, "dequantize_fp8": 1, "quantize_rows": 30} | SPARSE, kinds
