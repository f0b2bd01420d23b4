"""Build the wheel that users install, with compiled kernels for every architecture, and look into it: ``make wheel`` (minutes).

    python .ci/wheel.py [DIST]            build into DIST (dist), then check
    python .ci/wheel.py --check WHEEL     check only

Needs nvcc of CUDA 13, g++ and any torch from 2.11 on, a CPU build as well. No GPU is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 100_000_000  # bytes, PyPI's
# What manylinux_2_28 has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
NEEDED = {"libcudart.so.13", "libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}


def build(dist: Path) -> Path:
    """The wheel, built from a copy of the sources: a build leaves folders behind in the tree it runs in."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        for name in ("fp4_inductor", "csrc"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_lib"))
        command = [sys.executable, "-m", "pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation", "-w", str(dist.absolute())]
        subprocess.run(command, cwd=tree, check=True, env={**os.environ, "FP4_INDUCTOR_WHEEL": "1", "PYTHONPATH": ""})
    return max(dist.glob("fp4_inductor-*manylinux*.whl"), key=lambda path: path.stat().st_mtime)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def too_new(library: Path) -> list[str]:
    """Versions of system symbols that an old system does not have, and libraries that nobody brings."""
    versions = re.findall(r"\((GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)", run("objdump", "-T", str(library)))
    new = {f"{name}_{version}" for name, version in versions if tuple(map(int, version.split("."))) > NEWEST[name]}
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", str(library))))
    return sorted(new | (needed - NEEDED))


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel, a line each; prints what is in it."""
    import triton

    from fp4_inductor.kernels import csrc, make_wheel

    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cuobjdump = str(shipped) if shipped.exists() else "cuobjdump"
    found = [] if wheel.stat().st_size < LIMIT else [f"{wheel.stat().st_size} bytes; PyPI takes {LIMIT}"]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        libraries = Path(folder) / "fp4_inductor" / "_lib"
        for arch in make_wheel.ARCHITECTURES:
            target, bytes_, kernels = f"sm_{arch}{'a' if arch >= 90 else ''}", 0, 0
            for name, kernel in ((name, csrc.LIBRARIES[name]) for name in csrc.kernels_for(arch)):
                library = libraries / f"{name}.sm_{arch}.so"
                if not library.exists():
                    found.append(f"{library.name} is missing")
                    continue
                elf = run(cuobjdump, "--list-elf", str(library))
                functions = len(re.findall(r"Function \S+:", run(cuobjdump, "--dump-resource-usage", str(library))))
                bytes_, kernels = bytes_ + library.stat().st_size, kernels + functions
                found += [f"{library.name} has no {target} code: {elf}"] if f".{target}.cubin" not in elf or not functions else []
                found += [f"{library.name} needs {what}" for what in too_new(library)]
                found += [] if f" {kernel.function}\n" in run("objdump", "-T", str(library)) else [f"{library.name} has no {kernel.function}"]
            print(f"{target:8} {len(csrc.kernels_for(arch)):3} libraries {kernels:5} kernels {bytes_ / 1e6:6.2f} MB")
        found += [f"binding.so needs {what}" for what in too_new(libraries / "binding.so")]
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    return found


def main(*args: str) -> int:
    sys.path.insert(0, str(ROOT))
    if args[:1] == ("--check",):
        wheel = Path(args[1])
    else:
        dist = Path(args[0] if args else "dist")
        dist.mkdir(exist_ok=True)
        wheel = build(dist)
    found = problems(wheel)
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
