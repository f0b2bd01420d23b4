"""Make the virtual environment that ``make test`` and ``make demo`` run in. Standard library only.

    python .ci/environment.py VENV TORCH EXTRAS

EXTRAS are those of pyproject.toml: "models" is what the examples need, "models,test,docs,dev" what the whole check needs.
torch comes from the first of: VENV itself, if it exists and has torch >= 2.11; the calling Python, if it has (a CUDA build,
say); TORCH, a pip requirement, options allowed. It is settled before anything else is installed, because a bare
"torch" pulled in by another requirement would be the registry's newest.
"""

from __future__ import annotations

import os
import shlex
import site
import subprocess
import sys
import venv
from pathlib import Path

OLDEST_TORCH = (2, 11)
ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"


def version_of(package: str, python: Path | str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def usable_torch(python: Path | str) -> str | None:
    version = version_of("torch", python)
    return version if version and tuple(int(n) for n in version.split(".")[:2]) >= OLDEST_TORCH else None


def packages_here() -> list[str]:
    """Where this Python, itself perhaps a virtual environment, finds its packages."""
    places = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return [p for p in places if os.path.isdir(p)]


def main(target: Path, torch: str, extras: str) -> None:
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=True, symlinks=True)

    # --no-compile: of the modules that are installed a fraction is ever imported. Python compiles those when they are: half a minute less.
    def pip_install(*what: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *what], cwd=ROOT, check=True)

    if found := usable_torch(python):
        print(f"using torch {found} of {target}", flush=True)
    elif found := usable_torch(sys.executable):
        print(f"using torch {found} of {sys.executable}", flush=True)
        # A .pth rather than --system-site-packages: that one skips the packages of a calling virtual environment.
        [packages] = target.glob("lib/python*/site-packages")
        (packages / "_packages_of_the_calling_python.pth").write_text("".join(p + "\n" for p in packages_here()))
    else:
        print(f"installing {torch}", flush=True)
        pip_install(*shlex.split(torch))

    # A CUDA build of torch comes with the Triton it was made for: leave that one alone.
    has_triton = version_of("triton", python) is not None
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if not (has_triton and line.startswith("triton"))]
    chosen = target / "fp4_constraints.txt"
    chosen.write_text("\n".join([*pins, f"torch=={version_of('torch', python)}"]) + "\n")
    print(f"installing fp4_inductor[{extras}]", flush=True)
    pip_install("--editable", f".[{extras}]", "--constraint", str(chosen.resolve()))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
