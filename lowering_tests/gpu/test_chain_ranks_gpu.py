"""csrc/gemm/linear_chain.cu on two GPUs that sum inside the launch, against the reference, which has the whole weights."""

from __future__ import annotations

import csv

import pytest
import torch

from lowering_tests.integrations.test_parallel import SCRIPT, run_ranks

pytestmark = pytest.mark.gpu
ROOT = SCRIPT.parents[2]


def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("two GPUs of compute capability 9.0")
    run_ranks(ROOT / "benchmarks" / "chain.py", "--out", str(tmp_path / "chain.csv"), device="cuda")
    with (tmp_path / "chain.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["ranks"] for row in rows} == {"1", "2"}
    for row in rows:
        assert float(row["error"]) < 2e-2, row
