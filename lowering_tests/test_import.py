"""``import fp4_inductor`` is cheap and touches nothing: no Triton, no Inductor, no Transformers, no CUDA."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("import")  # one worker runs the subprocess once for all tests of this file

LIMIT_S = 0.3
FORBIDDEN = ("triton", "torch._inductor.compile_fx", "torch._dynamo", "transformers")

_TIMED = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import fp4_inductor
took = time.perf_counter() - start
print(json.dumps({"s": took, "new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""

_FORKED = """
import os, sys
import torch
import fp4_inductor
if torch.cuda.is_initialized():
    sys.exit("CUDA was initialised by the import")
pid = os.fork()
if pid == 0:
    w = torch.randn(8, 32)
    parts = torch.ops.fp4.quantize(w, "amax", None, None)
    y = torch.ops.fp4.linear(torch.eye(32), *parts)
    ok = torch.equal(y.T, torch.ops.fp4.dequantize(*parts, torch.float32))
    if torch.cuda.is_available():
        ok = ok and bool((torch.ones(2, device="cuda") == 1).all())
    os._exit(0 if ok else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    runs = [_python(_TIMED) for _ in range(3)]
    failed = [r.stderr for r in runs if r.returncode]
    assert not failed, failed[0]
    return [json.loads(r.stdout) for r in runs]


def test_import_adds_little_to_torch(imports):
    times = [run["s"] for run in imports]
    assert statistics.median(times) <= LIMIT_S, times


@pytest.mark.parametrize("name", FORBIDDEN)
def test_import_does_not_bring(imports, name):
    brought = [m for run in imports for m in run["new"] if m == name or m.startswith(name + ".")]
    assert not brought


def test_import_does_not_initialise_cuda(imports):
    assert [run["cuda"] for run in imports] == [False] * 3


def test_a_child_forked_after_the_import_can_compute():
    child = _python(_FORKED)
    assert child.returncode == 0, child.stderr
