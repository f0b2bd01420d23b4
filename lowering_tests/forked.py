"""Scripts as ``python SCRIPT`` runs them, in processes that are forked from one that has imported everything: a start and the imports take 5 to 8 s."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fp4_inductor.api", "torch._inductor.compile_fx", "transformers.models.auto.modeling_auto"])


def run(script: Path, *args: str, before: str = "", stdin: str = "", timeout: int = 600, **env: str) -> subprocess.CompletedProcess:
    """The exit status and what was written; ``before``: Python that the process runs first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(stdin)
        child = _CONTEXT.Process(target=_child, args=(str(script), args, before, {**os.environ, **env}, folder))
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([str(script), *args], -1 if child.exitcode is None else child.exitcode, out, err)


def begin(files: Sequence[int], env: dict[str, str], before: str) -> None:
    """In a process that was forked: stdin, stdout and stderr are ``files``, the environment has ``env``, and ``before`` has run."""
    os.environ.update(env)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
    exec(before, {})


def _child(script: str, args: tuple[str, ...], before: str, env: dict[str, str], folder: str) -> None:
    files = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT))
    begin([os.open(os.path.join(folder, name), flags, 0o600) for name, flags in files], env, before)
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
