"""Processes that share a model: what the scripts that torchrun starts have in common, and a group of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fp4_inductor
from fp4_inductor import _exchange


def group_of_one(folder: Path, monkeypatch: Any) -> Iterator[Any]:
    """For a fixture: a group of this process alone, whose sum changes nothing; no rank shares memory yet."""
    monkeypatch.setattr(_exchange, "_GROUPS", {})
    monkeypatch.setattr(_exchange, "_REASONS", {})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def load_divided(path: str) -> Any:
    """This rank's part of the model in ``path``, by Transformers' tensor parallelism."""
    import transformers

    options: dict[str, Any] = {"tp_plan": "auto"}  # its name before DistributedConfig
    if hasattr(transformers, "DistributedConfig"):
        options = {"distributed_config": transformers.DistributedConfig(tp_plan="auto")}
    return fp4_inductor.load_pretrained(path, **options)


def write(found: Any, out: str) -> None:
    """What this rank found, as JSON in ``out``.RANK.json."""
    with open(f"{out}.{dist.get_rank()}.json", "w") as file:
        json.dump(found, file)


def end() -> None:
    """All ranks end together."""
    dist.barrier()
    dist.destroy_process_group()
