"""decisions(): what was lowered in this process, without a module to ask."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch import nn

from fp4_inductor import FP4Linear, decisions, explain
from fp4_inductor import _journal as journals
from fp4_inductor._journal import LOWERED, Journal
from fp4_inductor.explain import ExplainRow
from lowering_tests.fake_cuda import call, code_generation

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _from_zero():
    decisions(clear=True)
    yield
    decisions(clear=True)


def lower_on_an_h100(m: int = 300, layers: int = 2) -> None:
    def model():
        return nn.Sequential(*(FP4Linear(256, 256, dtype=BF16, device="cuda") for _ in range(layers)))

    with code_generation(csrc=""):
        call(torch.compile(model(), dynamic=False, fullgraph=True), torch.empty(m, 256, dtype=BF16, device="cuda"))


def test_rows_and_text():
    assert decisions().rows == []
    assert "no quantized call was lowered in this process" in str(decisions())
    lower_on_an_h100(100)
    lower_on_an_h100(1)
    found = decisions()
    assert all(isinstance(row, ExplainRow) for row in found.rows)
    assert [(r.kernel, r.decision, r.n, r.k, r.dtype) for r in found.rows] == [
        *[("cuda_wide", "proven", 256, 256, "bfloat16")] * 2,
        *[("cuda_gemv", "proven", 256, 256, "bfloat16")] * 2,
    ]
    text = str(found)
    assert "cuda_wide" in text.split("note:")[0] and "not taken:" in text
    assert len(decisions(clear=True).rows) == 4
    assert decisions().rows == []


def test_explain_still_collects_its_own():
    lower_on_an_h100()
    layer = FP4Linear.from_weight(torch.randn(32, 64))
    assert len(explain(torch.compile(layer), torch.randn(2, 64)).rows) == 1
    assert len(decisions().rows) == 3


def test_memory_is_bounded():
    journal: Journal[int] = Journal(keep=3)
    for i in range(10):
        journal.record(i)
    assert (list(journal.kept), journal.dropped) == ([7, 8, 9], 7)
    with journal.listen() as inside:
        journal.record(10)
    assert inside == [10] and list(journal.kept) == [8, 9, 10]
    journal.forget()
    assert (list(journal.kept), journal.dropped) == ([], 0)
    assert LOWERED.kept.maxlen == 4096 and journals.LEFT_DENSE.kept.maxlen == 256


def test_an_entry_is_small():
    lower_on_an_h100(layers=2)  # what is shared by all
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    lower_on_an_h100(layers=10)
    kept = list(LOWERED.kept)
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    ours = [
        s for s in after.compare_to(before, "filename") if "fp4_inductor/lowerings" in s.traceback[0].filename or "kernels/select" in s.traceback[0].filename
    ]
    assert len(kept) == 12
    assert sum(s.size_diff for s in ours) < 10 * 8192
    assert len({id(e.refused) for e in kept}) <= 2, "reasons are shared by equal layers"


def test_what_is_left_out_is_said(monkeypatch):
    small: Journal = Journal(keep=1)
    lower_on_an_h100(layers=1)
    for name in ("fp4_inductor.explain", "fp4_inductor.lowerings.journal"):
        monkeypatch.setattr(sys.modules[name], "LOWERED", small)
    lower_on_an_h100()
    found = decisions()
    assert (len(found.rows), found.dropped) == (1, 1)
    assert str(found).endswith("1 earlier calls are left out.")


def test_a_process_that_compiled_nothing_pays_nothing():
    code = "import sys, fp4_inductor; print(fp4_inductor.decisions()); assert 'torch._inductor.compile_fx' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.startswith("decisions: no quantized call")
