"""Make the virtual environment that ``make test`` and ``make demo`` run in. Standard library only.

    python .ci/environment.py VENV [TORCH]

If the calling Python already has torch >= 2.11 (a CUDA build, say), the environment uses that one and installs no
other. Otherwise TORCH (a pip requirement, options allowed) is installed first, because a bare "torch" pulled in by
another requirement would be the registry's newest.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import site
import subprocess
import sys
import venv
from pathlib import Path

OLDEST_TORCH = (2, 11)
EXTRAS = "models,test,dev"
ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"


def torch_here() -> str | None:
    """The version of torch that this Python sees, if it is new enough."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if tuple(int(n) for n in version.split(".")[:2]) >= OLDEST_TORCH else None


def packages_here() -> list[str]:
    """Where this Python, itself perhaps a virtual environment, finds its packages."""
    places = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return [p for p in places if os.path.isdir(p)]


def main(target: Path, torch: str) -> None:
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=True, symlinks=True)

    def pip_install(*what: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *what], cwd=ROOT, check=True)

    found = torch_here()
    if found is not None:
        print(f"using torch {found} of {sys.executable}", flush=True)
        # A .pth rather than --system-site-packages: that one skips the packages of a calling virtual environment.
        [purelib] = target.glob("lib/python*/site-packages")
        (purelib / "_packages_of_the_calling_python.pth").write_text("".join(p + "\n" for p in packages_here()))
    else:
        print(f"installing {torch}", flush=True)
        pip_install(*shlex.split(torch))
    # A CUDA build of torch comes with the Triton it was made for: leave that one alone.
    triton = subprocess.run([python, "-c", "import triton; print(triton.__version__)"], capture_output=True, text=True, check=False)
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if not (line.startswith("triton") and triton.returncode == 0)]
    (target / "constraints.txt").write_text("\n".join(pins) + "\n")
    print(f"installing fp4_inductor[{EXTRAS}]", flush=True)
    pip_install("--editable", f".[{EXTRAS}]", "--constraint", str((target / "constraints.txt").resolve()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "torch==2.13.0")
