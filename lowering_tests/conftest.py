"""What every test shares: marks that skip, seeds, private compile caches, a fresh Dynamo."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile

# Before torch is imported: a test must never meet a graph or a kernel that an older version of this package compiled.
# The workers of pytest-xdist are children of the process that makes the caches, and share them: what one compiled the other has.
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _WORKER:
    _CACHES = tempfile.mkdtemp(prefix="fp4_inductor_tests_")
    for _name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FP4_INDUCTOR_CACHE", "FP4_EMULATED_CACHE"):
        os.environ[_name] = os.path.join(_CACHES, _name.lower())
        os.makedirs(os.environ[_name], mode=0o700)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if _WORKER:
    # The workers are the parallelism; compile in the worker itself instead of in a pool of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # on a GPU machine, perhaps: the files that draw examples say so themselves
    pass
else:
    # The same examples in every CI run; by hand, new ones each time.
    settings.register_profile("ci", derandomize=True, database=None, print_blob=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")

NO_GPU = "no CUDA device: gpu tests run on one"
LONG = {
    f"test_{name}.py"
    for name in (
        "quickstart", "docs", "pages", "moe_kernels", "interpreter", "decode_attention", "attention_step", "prompts", "quantized_attention", "executed", "csrc",
        "benchmarks",
    )
}  # fmt: skip
NOT_ASKED = "takes minutes: run with --slow"


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    # Single tests of a minute and more first, so that the workers end together.
    items.sort(key=lambda item: item.path.name not in LONG)
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason=NO_GPU)))
    if not config.getoption("--slow"):
        skips.append(("slow", pytest.mark.skip(reason=NOT_ASKED)))
    for item in items:
        for name, skip in skips:
            if item.get_closest_marker(name):  # not item.keywords: that holds the folder's name too
                item.add_marker(skip)


def pytest_configure():
    # A shell's background job ignores Ctrl-C, and so do the processes that tests start, unless this one does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    # Tracing and compiling make millions of objects that live for a moment, beside a million that stay until the end (modules, collected tests).
    # Python's collector looks through all of them again and again: 5 % of what tests of compiled models take.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure(config):
    if not _WORKER:
        shutil.rmtree(_CACHES, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quick_default(monkeypatch):
    """The default is "activation" where a test does not say otherwise: "gptq" takes ten times as long, and has tests of its own.

    A few tokens of calibration text show that the model writes it.
    """
    monkeypatch.setattr("fp4_inductor.models.scale_choice.SECONDS", 0.0)
    monkeypatch.setattr("fp4_inductor.models.self_calibration.SEQUENCES", 2)
    monkeypatch.setattr("fp4_inductor.models.self_calibration.TOKENS", 8)


@pytest.fixture(autouse=True)
def _no_door(monkeypatch):
    """What was decided for a GPU that is not there says nothing of how calls reach its kernels: each would be compiled to say so, which takes nvcc minutes."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("fp4_inductor.kernels.select.csrc_door", lambda name, arch: "no CUDA device")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """No test inherits another's compiled graphs, recompile counts or dynamic-shape history."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
