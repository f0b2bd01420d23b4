"""benchmarks/moe.py runs, on a CPU, and its rows are what the next run on a GPU will write."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from lowering_tests import forked

pytest.importorskip("transformers")
SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "moe.py"


def test_smoke(tmp_path):
    out = tmp_path / "moe.csv"
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH"))))
    run = forked.run(SCRIPT, "--smoke", "--out", str(out), PYTHONPATH=path)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = list(csv.DictReader(out.open()))
    kinds = [(name, weights) for name in ("tiny", "tiny_gpt_oss") for weights in ("nvfp4", "sparse24_nvfp4")]
    assert [(r["layer"], r["weights"], r["tokens"]) for r in rows] == [(*kind, t) for kind in kinds for t in ("1", "4", "33")]
    for row in rows:
        assert float(row["error"]) < 7e-3
        assert float(row["us"]) > 0
        assert row["kernel"] == "cpu"
        if row["weights"] == "nvfp4":
            assert float(row["bf16_batched_mm_us"]) > 0
            assert float(row["bf16_grouped_mm_us"]) > 0
        assert row["humming_us"] == ""
    assert "humming: left out (needs a GPU)" in run.stdout


def test_a_peer_is_timed_and_compared(monkeypatch, capsys):
    """The adapter's side of the script, with a peer that is our own reference; and one that fails is named and left out."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import moe
    import torch

    class Same:
        def __init__(self, parts, biases, act):
            self.parts, self.biases = parts, biases

        def prepare(self, x, ids, weights):
            return lambda: torch.ops.fp4.moe(x, ids, weights, *self.parts, *self.biases)

    class Broken(Same):
        def prepare(self, x, ids, weights):
            raise RuntimeError("no kernel for this shape")

    monkeypatch.setattr(moe.moe_peers, "PEERS", {"same": Same, "broken": Broken})
    monkeypatch.setattr(moe.moe_peers, "available", lambda device: ({"same": Same, "broken": Broken}, {}))
    (row,) = moe.measure(moe.TINY[:1], (4,), "cpu", True)
    assert float(row["same_us"]) > 0
    assert row["same_error"] == row["error"]
    assert (row["broken_us"], row["broken_error"]) == ("", "")
    assert "broken: RuntimeError: no kernel for this shape" in capsys.readouterr().out
