"""The quickstart as a newcomer runs it: a subprocess, offline, the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"
ROW = re.compile(r"^(bf16|NVFP4) +([\d.]+) +(?:(0\.\d+) +)?([\d.]+)(?: +([\d.]+) +([\d.]+) s)?$", re.MULTILINE)

# austen_dense in bfloat16 on the first windows of 512 bytes; on 32 as recorded when it was trained (examples/assets/README.md).
BF16_NATS = {16: 1.2823, 32: 1.2144}
# Four-over-six scales cost +0.0072 in float32 arithmetic; the bound is the project's promise for the default.
MOST_ADDED_NATS = 0.009


# A third of the text that "gptq" has the model write, which is half of what the run takes.
LITTLE_TEXT = """
import runpy, sys
from fp4_inductor.models import gptq
gptq.SEQUENCES, gptq.HELD_OUT = 24, 4
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, little_text: bool = False) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *(("-c", LITTLE_TEXT) if little_text else ()), str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)


@pytest.mark.parametrize("windows", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_default_run(windows):
    """32 windows and all text are what a newcomer gets; 16 and a third of the text run the same code."""
    # One test, not a fixture and five: each pytest worker would repeat the run.
    done = run("--tokens", "32", "--windows", str(windows), little_text=windows < 32)
    assert done.returncode == 0, done.stderr[-4000:]
    check_report(done.stdout)
    check_figures(done.stdout, windows)
    check_text(done.stdout.split("--- NVFP4\n")[1].split("\n\n")[0])
    check_explain(done.stdout.split("explain: one decode step, torch.compile\n")[1].split("\n\n")[0])


def check_report(output: str) -> None:
    assert re.search(r"quantized +35 layers", output)
    assert re.search(r"coverage +100\.00 %", output)


def check_figures(output: str, windows: int) -> None:
    rows = {name: dict(zip(("nats", "kl", "mb", "speed", "first"), (float(v or "nan") for v in values))) for name, *values in ROW.findall(output)}
    assert rows["bf16"]["nats"] == pytest.approx(BF16_NATS[windows], rel=0.003)
    assert 0.0 < rows["NVFP4"]["nats"] - rows["bf16"]["nats"] <= MOST_ADDED_NATS
    assert rows["NVFP4"]["kl"] == pytest.approx(0.0086, rel=0.2)  # by the text that the model writes to calibrate on, which differs between versions of torch
    assert rows["bf16"]["mb"] / rows["NVFP4"]["mb"] == pytest.approx(3.34, rel=0.01)  # the embedding stays in bfloat16
    assert "Speed says nothing at this size" in output


def check_text(said: str) -> None:
    assert len(said.strip()) >= 24
    assert len(re.findall(r"[a-z]+", said.lower())) >= 3
    assert sum(c.isalpha() or c in " .,;:'\n" for c in said) >= 0.9 * len(said)


def check_explain(step: str) -> None:
    rows = re.findall(r"^ *(\d+) +fp4\.linear +1 +\d+ +\d+ +bfloat16 +cpu +cpu +proven", step, re.MULTILINE)
    assert sum(map(int, rows)) == 35


def test_sparse_run():
    """The model that was trained 2:4: quantized as it is, at little cost, by the sparse kernels."""
    done = run("--sparse", "--eager", "--tokens", "4", "--windows", "8", "--speed")
    assert done.returncode == 0, done.stderr[-4000:]
    speeds = re.findall(r"^(?:bf16|2:4 NVFP4) +[\d.]+ +(?:0\.\d+ +)?[\d.]+ +([\d.]+) +[\d.]+ s$", done.stdout, re.MULTILINE)
    assert len(speeds) == 2 and min(map(float, speeds)) > 1.0
    assert re.search(r"quantized +35 layers", done.stdout)
    assert re.search(r"3\.5 bits sparse24_nvfp4 +35 layers", done.stdout)
    assert "!!" not in done.stdout
    assert 0.0 < float(re.search(r"2:4 NVFP4 costs ([+-][\d.]+) nats", done.stdout)[1]) <= 0.012
    step = done.stdout.split("explain: one decode step, eager\n")[1].split("\n\n")[0]
    assert sum(map(int, re.findall(r"^ *(\d+) +fp4\.sparse_linear +1 ", step, re.MULTILINE))) == 35


@pytest.mark.parametrize(("arguments", "remedy"), [(["--device", "cuda"], "--device cpu")])
def test_what_cannot_run_says_so(arguments, remedy):
    done = run(*arguments)
    assert done.returncode == 2
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr
