"""The examples as a newcomer runs them: subprocesses, offline, the embedded or tiny models. (The quickstart: test_quickstart.py.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNS = {
    "load_nvfp4_checkpoint.py": (["--tokens", "8", "--eager"], [r"coverage +100\.00 %", r"loaded [\d.]+ MB in", r"tokens/s"]),
    "generate_moe.py": (["--tokens", "4", "--eager"], [r"8 weights of routed experts in FP4: [89]\d\.\d %", r"tokens/s"]),
    "chat.py": (["--tokens", "8", "--length", "64"], [r"tokens/s; generate\(\): 8 tokens[^$]*tokens/s; generate\(\): 8 tokens"]),
    "gpt_oss.py": (["--tokens", "4", "--eager"], [r"quantized +4 layers", r"tokens/s"]),
    "finetune_lora.py": (
        ["--steps", "8", "--batch", "4", "--windows", "2"],
        [r"loss after: +[\d.]+ nats per byte \(-0\.", r"loaded again: KL to the trained model 0\.00"],
    ),
    "quantize_and_export.py": (["--model", "austen_moe", "--out", "{out}"], [r"modelopt; read back, \d+ tensors are equal bit for bit and 0 are not"]),
}


# As in conftest.py: "gptq", the default for models of this size, takes eight seconds of each run; test_quickstart.py has it.
QUICK = """
import runpy, sys
from fp4_inductor.models import scale_choice
scale_choice.SECONDS = 0.0
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SAID = {"chat.py": "They arrived at Bath.\nCatherine was\n"}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    arguments, wanted = RUNS[name]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", QUICK, str(EXAMPLES / name), *(a.format(out=tmp_path / "out") for a in arguments)]
    done = subprocess.run(command, input=SAID.get(name), capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for pattern in wanted:
        assert re.search(pattern, done.stdout), f"{pattern!r} not in:\n{done.stdout[-3000:]}"


def test_every_example_is_named_in_a_test():
    tests = "".join(p.read_text() for p in Path(__file__).parent.rglob("test_*.py"))
    assert [p.name for p in EXAMPLES.glob("*.py") if p.name != "_shared.py" and p.name not in tests] == []
