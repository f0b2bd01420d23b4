"""Which groups of ranks get memory that they share. Making it needs GPUs (gpu/test_chain_ranks_gpu.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fp4_inductor import _exchange, errors
from fp4_inductor.integrations import rank_memory

REASONS = {
    "a CPU": (dict(device=torch.device("cpu")), "compute capability 9.0, the model is on cpu"),
    "another GPU": (dict(capability=(8, 0)), "compute capability 9.0, the model is on cuda:0"),
    "too many": (dict(ranks=9, local="9"), "9 ranks: one launch takes at most 8"),
    "several machines": (dict(local="1"), "all on one machine"),
    "another launcher": (dict(local=None), "by torchrun"),
    "GPUs that each sees alone": (dict(gpus=1), "sees the GPUs of the others"),
    "another backend": (dict(backend="gloo"), "the group's backend is gloo, not nccl"),
    "no way between them": (dict(peers=False), r"GPUs \(0, 1\) cannot read each other's memory"),
    "two H100": ({}, ""),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_there_is_none(case, monkeypatch):
    given, words = REASONS[case]
    options = dict(device=torch.device("cuda", 0), capability=(9, 0), ranks=2, local="2", gpus=2, backend="nccl", peers=True) | given
    made = []
    monkeypatch.setattr(_exchange, "_GROUPS", {})
    monkeypatch.setattr(_exchange, "_REASONS", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: options["capability"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: options["gpus"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: options["peers"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: options["ranks"])
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: options["backend"])
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: made.append("all are here"))
    monkeypatch.setattr(rank_memory, "shared_zeros", lambda *args: made.append(args) or (torch.zeros(1), [16, 32], 1))
    if options["local"] is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", options["local"])
    reason = rank_memory.join("tp", options["device"])
    assert _exchange.why_not("tp") == reason and (reason == "") == (words == "")
    if words:
        assert not made
        assert re.search(words, reason)
        with pytest.raises(errors.DeviceError, match="Load the model"):
            _exchange.of("tp")
        return
    assert _exchange.of("tp").addresses == (16, 32) and made[0][0] == _exchange.size(2)
    assert made[1:] == ["all are here"]
    assert rank_memory.join("tp", options["device"]) == "" and len(made) == 2, "once"


def test_ranks_agree(tmp_path):
    """All of them have memory or none has: one that cannot, or that fails while it is made, tells the others why."""
    from lowering_tests.integrations.test_parallel import run_ranks

    run_ranks(Path(__file__).with_name("agreeing_ranks.py"), str(tmp_path / "r"))
    first, second = (json.loads((tmp_path / f"r.{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == {
        "all can": ["", True],
        "one cannot": ["rank 1: no way to the others", False],
        "one fails": ["rank 1: torch made no memory that the ranks share (RuntimeError: a container keeps them apart)", False],
    }
