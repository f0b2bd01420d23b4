"""Sums over vLLM's tensor-parallel ranks inside a launch: the operator by which its graphs sum, and memory that the ranks share (:mod:`..rank_memory`)."""

from __future__ import annotations

import weakref
from typing import Any

from ...config import dispatch_config
from ...passes.operators import add_sum
from ..rank_memory import join_or_agree
from .engine import ALL_REDUCE, tensor_parallel_group, torch_group, why_apart
from .log import say_once

_asked: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose ranks were asked


def register() -> None:
    """Let graphs be read that sum by vLLM's operator. May be called again."""
    add_sum(ALL_REDUCE, torch_group)


def join(vllm_config: Any) -> None:
    """Make the memory of this process's tensor-parallel ranks, once for each group; nothing if the process is alone.

    Called ahead of each layer that is built: the ranks build the same layers in the same order, so that all of them are here; nothing is compiled yet.
    """
    group = tensor_parallel_group()
    if group is None or group in _asked:
        return
    _asked.add(group)
    reason = join_or_agree(group.device_group, group.device, group.cpu_group, _why_off() or why_apart(group))
    if group.rank_in_group == 0 and vllm_config is not None:
        how = f"by vLLM's all-reduce: {reason}" if reason else "inside fp4.linear_chain"
        say_once(f"a step of one token sums over {group.world_size} ranks {how}", vllm_config.compilation_config)


def _why_off() -> str:
    return "fp4.linear_chain is switched off" if dict(dispatch_config().thresholds).get("chain") == 0 else ""
