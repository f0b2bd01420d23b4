"""Two processes: tensor parallelism, and expert parallelism with experts of the other rank mapped to -1."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from lowering_tests.vllm.served import by_transformers, differences, engine

EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense-modelopt", {}),
        ("moe-modelopt", EXPERTS),
        pytest.param("gptoss-modelopt", {}, marks=pytest.mark.slow),  # test_experts.py has its loader alone
        pytest.param("gptoss-transformers", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_tokens_of_one(folders, monkeypatch, name, options):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    folder = folders(name)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(folder, dtype="float32", quantization="fp4_inductor", **parallel, **options) as llm:
        got = llm.ask()
    want = by_transformers(fp4_inductor.load_pretrained(folder, dtype=torch.float32).float())
    common, worst, _ = differences(got, want)
    assert common == [len(tokens) for tokens, _ in want]
    assert worst < 1e-3
