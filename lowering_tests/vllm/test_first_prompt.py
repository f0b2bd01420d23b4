"""A process of its own whose first prompt is one token: nothing has asked for AMX tiles before vLLM's attention uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from lowering_tests.vllm import served
served.environment()
if __name__ == "__main__":
    import sys
    with served.engine(sys.argv[1], quantization="fp4_inductor") as llm:
        [(tokens, _)] = llm.ask([[64]], 4)
    print("tokens", tokens)
"""


def test_first_prompt_of_one_token(folders):
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folders("llama-modelopt-nvfp4"))], capture_output=True, text=True, env=environment, cwd=root, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens [" in done.stdout
