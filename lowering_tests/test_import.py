"""``import fp4_inductor`` is cheap and touches nothing: no Triton, no Inductor, no Transformers, no CUDA."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

LIMIT = 0.3  # of what torch takes
FORBIDDEN = ("triton", "torch._inductor.compile_fx", "torch._dynamo", "transformers")

_TIMED = """
import json, sys, time
start = time.process_time()  # of the processor, and beside torch: the figure must not depend on the machine or on what else it does
import torch
torch_s = time.process_time() - start
before = set(sys.modules)
start = time.process_time()
import fp4_inductor
took = time.process_time() - start
print(json.dumps({"ratio": took / torch_s, "new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
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


def test_import_is_cheap_and_touches_nothing():
    runs = []
    while sum(run["ratio"] <= LIMIT for run in runs) < 2 and len(runs) < 3:  # until the median of three is known
        done = _python(_TIMED)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    ratios = [run["ratio"] for run in runs]
    assert statistics.median_low(ratios) <= LIMIT, ratios
    brought = {m for run in runs for m in run["new"] if any(m == name or m.startswith(name + ".") for name in FORBIDDEN)}
    assert brought == set()
    assert not any(run["cuda"] for run in runs)


def test_a_child_forked_after_the_import_can_compute():
    child = _python(_FORKED)
    assert child.returncode == 0, child.stderr


_UNREGISTERED = """
import sys, warnings
import torch, fp4_inductor
import fp4_inductor.lowerings
def broken():
    raise ImportError("moved in a later torch")
fp4_inductor.lowerings.register = broken
layer, x = fp4_inductor.FP4Linear.from_weight(torch.randn(16, 32)), torch.randn(3, 32)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    same = torch.equal(torch.compile(torch.nn.Linear(4, 4).requires_grad_(False))(x[:, :4]).isfinite(), torch.ones(3, 4, dtype=torch.bool))
    same = same and torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
told = [str(w.message) for w in seen if "could not register" in str(w.message)]
sys.exit(0 if same and len(told) == 1 and "moved in a later torch" in told[0] else f"{same} {told}")
"""


def test_a_torch_that_moved_is_told_and_compiles_all_the_same():
    done = _python(_UNREGISTERED)
    assert done.returncode == 0, done.stderr


_PROBED = """
import importlib.util, sys
import fp4_inductor
for name in ("peft", "transformers.modeling_utils", "torch._inductor.compile_fx"):
    assert importlib.util.find_spec(name) is not None and name not in sys.modules, name
import peft, transformers.modeling_utils
for name in ("fp4_inductor.integrations.peft", "fp4_inductor.integrations.pretrained"):
    assert name in sys.modules, name
"""


def test_a_library_that_asks_for_another_does_not_keep_us_from_registering():
    """Transformers asks whether peft is installed, which finds the module and imports nothing."""
    done = _python(_PROBED)
    assert done.returncode == 0, done.stderr
