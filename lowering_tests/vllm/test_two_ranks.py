"""Two processes: tensor parallelism, and expert parallelism with experts of the other rank mapped to -1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp4_inductor
from fp4_inductor import _exchange
from lowering_tests.vllm.served import by_transformers, differences, engine

EXPERTS = {"enable_expert_parallel": True}


def why_no_memory(worker: Any) -> list[str]:
    """Why the ranks of each group of a worker's process share none."""
    return list(_exchange._REASONS.values())


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
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that a worker runs a function of this file
    folder = folders(name)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(folder, dtype="float32", quantization="fp4_inductor", **parallel, **options) as llm:
        got = llm.ask()
        reasons = llm.llm.collective_rpc(why_no_memory)
    assert reasons == [["rank 0: one launch across ranks is for compute capability 9.0, the model is on cpu"]] * 2
    want = by_transformers(fp4_inductor.load_pretrained(folder, dtype=torch.float32).float())
    common, worst, _ = differences(got, want)
    assert common == [len(tokens) for tokens, _ in want]
    assert worst < 1e-3
