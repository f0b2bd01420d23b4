"""The quickstart as a newcomer runs it: a subprocess, offline, the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("quickstart")  # one worker runs the subprocess once for all tests of this file

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"
ROW = re.compile(r"^(bf16|NVFP4) +([\d.]+) +(?:([\d.]+) +)?([\d.]+) +([\d.]+) +([\d.]+) s$", re.MULTILINE)

# austen_dense in bfloat16 on the first 32 x 512 bytes, as recorded when it was trained (examples/assets/README.md).
BF16_NATS = 1.2144
# Four-over-six scales cost +0.0072 in float32 arithmetic; the bound is the project's promise for the default.
MOST_ADDED_NATS = 0.009


def run(*arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, env=env, check=False)


@pytest.fixture(scope="module")
def output() -> str:
    done = run("--tokens", "32")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_figures_are_those_of_a_working_model(output):
    rows = {name: dict(zip(("nats", "kl", "speed", "mb", "first"), (float(v or "nan") for v in values))) for name, *values in ROW.findall(output)}
    assert rows["bf16"]["nats"] == pytest.approx(BF16_NATS, rel=0.003)
    assert 0.0 < rows["NVFP4"]["nats"] - rows["bf16"]["nats"] <= MOST_ADDED_NATS
    assert rows["NVFP4"]["kl"] == pytest.approx(0.0163, rel=0.05)
    assert rows["bf16"]["mb"] / rows["NVFP4"]["mb"] == pytest.approx(3.34, rel=0.01)  # the embedding stays in bfloat16
    assert min(rows["bf16"]["speed"], rows["NVFP4"]["speed"]) > 1.0


def test_text_is_english(output):
    said = output.split("--- NVFP4\n")[1].split("\n\n")[0]
    words = re.findall(r"[a-z]+", said.lower())
    assert len(words) >= 3
    assert len(said.strip()) >= 24
    assert sum(c.isalpha() or c in " .,;:'\n" for c in said) >= 0.9 * len(said)


def test_report_covers_every_layer(output):
    assert re.search(r"quantized +35 layers", output)
    assert re.search(r"coverage +100\.00 %", output)


def test_explain_names_every_call_of_the_compiled_step(output):
    step = output.split("explain: one decode step, torch.compile\n")[1].split("\n\n")[0]
    rows = re.findall(r"^(\d+) +fp4\.linear +1 +\d+ +\d+ +bfloat16 +cpu +cpu +proven", step, re.MULTILINE)
    assert sum(map(int, rows)) == 35


@pytest.mark.parametrize(("arguments", "remedy"), [(["--sparse"], "--dense"), (["--device", "cuda"], "--device cpu")])
def test_what_cannot_run_says_so(arguments, remedy):
    done = run(*arguments)
    assert done.returncode == 2
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr
