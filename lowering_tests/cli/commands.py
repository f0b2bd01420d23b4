"""What the tests of the command line share: running commands, damaging files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "examples" / "assets"
DENSE, MOE, SPARSE = (str(ASSETS / name) for name in ("austen_dense", "austen_moe", "austen_sparse24"))
NOVEL = str(ASSETS / "northanger_abbey_200k.txt")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
ENVIRONMENT |= {"TRANSFORMERS_VERBOSITY": "error"}  # as main() sets it: the server imports transformers earlier


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # the package may be on the path only
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


@dataclass
class Done:
    """A command that has ended."""

    args: tuple[str, ...]
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def must(self, status: int = 0) -> Done:
        assert self.status == status, f"{self.args}: {self.status}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err, self.err
        return self


class Commands:
    """``commands("inspect", folder)``: see server.py."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        server = [sys.executable, str(Path(__file__).with_name("server.py"))]
        self.process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())

    def __call__(self, *args: object, cwd: Path | None = None, stdin: str = "", before: str = "", unread: bool = False, **env: str) -> Done:
        files = {name: self.scratch / name for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_text(stdin)
        request = {name: str(path) for name, path in files.items()} | ({"stdout": None} if unread else {})
        request |= {"args": [str(a) for a in args], "cwd": str(cwd or self.scratch), "env": env, "before": before}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        out = "" if unread else files["stdout"].read_text()
        return Done(tuple(request["args"]), status, out, files["stderr"].read_text())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def inside(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` and what it holds; folders as empty entries."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def poke(folder: Path, tensor: str, value: bytes, file: str = "model.safetensors") -> None:
    """Overwrite the first bytes of a tensor."""
    from fp4_inductor.checkpoint.safetensors_file import read_header

    entry = read_header(folder / file).entries[tensor]
    with (folder / file).open("r+b") as f:
        f.seek(entry.start)
        f.write(value)
