"""What a user installs: the wheel holds every Python file, every data file and csrc/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_CODE = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # Built from a copy: a build leaves folders behind in the tree it runs in, and would pick up older ones.
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("fp4_inductor", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=NOT_CODE)
    command = [sys.executable, "-m", "pip", "wheel", "-qq", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [built] = (tree / "dist").glob("*.whl")
    return built


def files(folder: Path, *suffixes: str) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and (not suffixes or p.suffix in suffixes) and "__pycache__" not in p.parts}


def test_wheel_is_complete(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    python = {f"fp4_inductor/{f}" for f in files(ROOT / "fp4_inductor", ".py", ".json", ".typed")}
    sources = {f"fp4_inductor/_csrc/{f}" for f in files(ROOT / "csrc") if not f.endswith(".so")}
    assert sources
    assert (python | sources) - inside == set()
    assert {f for f in inside if not f.startswith(("fp4_inductor/", "fp4_inductor-"))} == set()
    [commands] = [f for f in inside if f.endswith(".dist-info/entry_points.txt")]
    assert "fp4-inductor = fp4_inductor.cli:main" in zipfile.ZipFile(wheel).read(commands).decode()


def test_installed_wheel_finds_its_sources(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import fp4_inductor._sources as s; d = s.csrc_dir(); print(d, len(list(d.rglob('*.*'))))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    where, count = done.stdout.split()
    assert where == str(tmp_path / "fp4_inductor" / "_csrc")
    assert int(count) == len(files(ROOT / "csrc"))


def test_checkout_finds_its_sources():
    from fp4_inductor._sources import csrc_dir

    assert csrc_dir() == ROOT / "csrc"
