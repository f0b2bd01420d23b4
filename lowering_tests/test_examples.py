"""The examples as a newcomer runs them: processes of their own, offline, the embedded or tiny models. (The quickstart: test_quickstart.py.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowering_tests import forked

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNS = {
    "load_nvfp4_checkpoint.py": (["--tokens", "8", "--eager"], [r"coverage +100\.00 %", r"loaded [\d.]+ MB in", r"tokens/s"]),
    "generate_moe.py": (["--tokens", "4", "--eager"], [r"8 weights of routed experts in FP4: [89]\d\.\d %", r"tokens/s"]),
    "chat.py": (["--tokens", "8", "--length", "64"], [r"tokens/s; generate\(\): 8 tokens[^$]*tokens/s; generate\(\): 8 tokens"]),
    "gpt_oss.py": (["--tokens", "4", "--eager"], [r"quantized +4 layers", r"tokens/s"]),
    "finetune_lora.py": (
        ["--steps", "4", "--batch", "2", "--windows", "2", "--lr", "5e-3"],
        [r"loss after: +[\d.]+ nats per byte \(-0\.", r"loaded again: KL to the trained model 0\.00"],
    ),
    "quantize_and_export.py": (["--model", "austen_moe", "--out", "{out}"], [r"modelopt; read back, \d+ tensors are equal bit for bit and 0 are not"]),
}


# As in conftest.py: "gptq", the default for models of this size, takes most of each run; test_quickstart.py has it.
QUICK = """
from fp4_inductor.models import scale_choice, self_calibration
scale_choice.SECONDS, self_calibration.TOKENS = 0.0, 16
"""
SAID = {"chat.py": "They arrived at Bath.\nCatherine was\n"}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    arguments, wanted = RUNS[name]
    arguments = [a.format(out=tmp_path / "out") for a in arguments]
    done = forked.run(EXAMPLES / name, *arguments, before=QUICK, stdin=SAID.get(name, ""), timeout=300, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-4000:]
    for pattern in wanted:
        assert re.search(pattern, done.stdout), f"{pattern!r} not in:\n{done.stdout[-3000:]}"


def test_every_example_is_named_in_a_test():
    tests = "".join(p.read_text() for p in Path(__file__).parent.rglob("test_*.py"))
    assert [p.name for p in EXAMPLES.glob("*.py") if p.name != "_shared.py" and p.name not in tests] == []
