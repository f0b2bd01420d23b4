"""Run by test_rank_memory.py on every rank of two: who gets memory where one of them cannot have it."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from fp4_inductor import _exchange
from fp4_inductor.integrations import rank_memory
from lowering_tests import ranks


def main(out: str) -> None:
    dist.init_process_group("gloo")
    last = dist.get_rank() == 1
    rank_memory._why_never = lambda device, group: ""

    def made(device: torch.device, group: dist.ProcessGroup) -> _exchange.Exchange:
        return _exchange.Exchange((16, 32), dist.get_rank(), None)

    def fails(device: torch.device, group: dist.ProcessGroup) -> _exchange.Exchange:
        if last:
            raise RuntimeError("a container keeps them apart")
        return made(device, group)

    found = {}
    for case, make, apart in (("all can", made, ""), ("one cannot", made, "no way to the others"), ("one fails", fails, "")):
        rank_memory._made = make
        group = dist.new_group([0, 1])
        with torch.device("meta"):  # as a model is built
            reason = rank_memory.join_or_agree(group, torch.device("cpu"), dist.group.WORLD, apart if last else "")
        assert _exchange.why_not(group.group_name) == reason
        found[case] = reason, _exchange.has(group.group_name)
    ranks.write(found, out)
    ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
