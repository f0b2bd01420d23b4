"""Diffusers' save_pretrained and from_pretrained of quantized models, in a process of its own: see diffusers_cases.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_saving_and_loading():
    standin = [] if importlib.util.find_spec("diffusers") else [str(HERE / "standin")]
    path = os.pathsep.join([str(HERE.parents[1]), *standin, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(HERE / "diffusers_cases.py")], capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert len(run.stdout.split()) == 10
