"""Fork, threads and processes: no CUDA at import, one build for many, the same bits in every thread and child."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fp4_inductor import FP4Linear

SETUP = """
import os, threading, time, torch, fp4_inductor
from fp4_inductor import FP4Linear
torch.manual_seed(0)
layer = FP4Linear.from_weight(torch.randn(64, 96) / 9, torch.randn(64))
xs = [torch.randn(m, 96) for m in (1, 3, 8, 9, 33)]
"""


def start(code: str, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)], env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return text


def test_import_and_a_forward_pass_do_not_touch_cuda_or_inductor():
    text = output(
        start("""
        import sys
        layer(xs[0])
        print(torch.cuda.is_initialized(), "torch._inductor.compile_fx" in sys.modules, "triton" in sys.modules)
    """)
    )
    assert text.split() == ["False"] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_the_same_bits():
    """After the parent has run its OpenMP threads; the child uses one thread, as a DataLoader worker does.

    Above 8 rows the product is the library's, whose last bits follow the number of threads on some CPUs.
    """
    text = output(
        start("""
        want = [layer(x) for x in xs]
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            same = all(torch.equal(layer(x), w) if len(x) <= 8 else torch.allclose(layer(x), w) for x, w in zip(xs, want))
            os._exit(0 if same else 3)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    )
    assert text.split() == ["child", "0"]


def test_processes_that_build_the_same_kernel_at_once(tmp_path):
    code = "print(hash(tuple(v for x in xs for v in layer(x).flatten().tolist())))"
    running = [start(code, FP4_INDUCTOR_CACHE=str(tmp_path)) for _ in range(3)]
    assert len({output(p) for p in running}) == 1
    assert not [f for f in tmp_path.iterdir() if f.suffix not in (".so", ".sha256")]
    assert all(f.stat().st_mode & 0o022 == 0 for f in tmp_path.iterdir())


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 segfaults when eight threads compile eight nn.Linear, this package not imported")
def test_eight_threads_build_compile_and_compute(tmp_path):
    """Each thread compiles its own layer, all start together, the kernel cache is empty."""
    text = output(
        start(
            """
        barrier, wrong = threading.Barrier(8), []
        layers = [FP4Linear.from_weight(torch.randn(32 + 16 * i, 96) / 9) for i in range(8)]
        def patient(compiled, x):
            for _ in range(20):
                try:
                    return compiled(x)
                except RuntimeError as error:  # Dynamo's answer to a thread that comes while another one compiles the code object they share
                    if "found no compiled frames" not in str(error):
                        raise
                    time.sleep(0.2)
            return compiled(x)
        def work(layer):
            try:
                # The layers share one code object, as nn.Linear's would; the setting is per thread.
                torch._dynamo.config.recompile_limit = 64
                barrier.wait()
                compiled = torch.compile(layer, fullgraph=True, dynamic=True)
                for x in xs:
                    if not torch.equal(patient(compiled, x), layer(x)):
                        wrong.append(x.shape)
            except Exception as error:
                wrong.append(error)
        threads = [threading.Thread(target=work, args=(l,)) for l in layers]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print("wrong", wrong)
    """,
            FP4_INDUCTOR_CACHE=str(tmp_path),
        )
    )
    assert "wrong []" in text


def test_eight_threads_share_one_layer():
    layer = FP4Linear.from_weight(torch.randn(130, 272) / 16)
    xs = [torch.randn(m, 272) for m in (1, 2, 8, 9, 40)]
    want = [layer(x) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: torch.equal(layer(xs[i % 5]), want[i % 5]), range(400)))
    assert all(results)
