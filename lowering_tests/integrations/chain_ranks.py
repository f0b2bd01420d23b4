"""Run by test_parallel.py on every rank of two, on a CPU: a decode step of a divided model, compiled for a pretended GPU whose ranks share memory."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

from fp4_inductor import KVCache, _exchange, passes
from fp4_inductor.decoding.ranks import ranks_of
from fp4_inductor.passes.missed import UNCHAINED, listen
from lowering_tests import norm_kernels, ranks
from lowering_tests.passes.conftest import Recorder, _run_after_passes


def main(out: str, path: str) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    model = ranks.load_divided(path)
    here = ranks_of(model)
    assert here is not None
    # Transformers 5.23 divides an embedding, too. Its sum stands before all layers, where there is no launch to sum in.
    of_embedding = sum(name.endswith("embed_tokens") for name in here.plan)

    def step(cache: KVCache) -> torch.Tensor:
        return model(input_ids=torch.tensor([[5]]), past_key_values=cache).logits

    def compiled() -> tuple[torch.Tensor, dict, str, list[str]]:
        torch._dynamo.reset()
        passes.reset_matches()
        recorder = Recorder()
        patches = {"force_disable_caches": True, "post_grad_custom_post_pass": recorder}
        with norm_kernels.on_a_cpu(), listen() as left, inductor_config.patch(patches):
            result = torch.compile(step, fullgraph=True, backend=_run_after_passes)(KVCache(model, 32, 1))
        return result, passes.matches(), recorder.texts[-1], [m.reason for m in left if m.what == UNCHAINED]

    with torch.no_grad():
        want = step(KVCache(model, 32, 1))
        apart = compiled()
        _exchange.add(here.group.group_name, _exchange.Exchange((0, 0), dist.get_rank(), None))
        together = compiled()
    found = [
        {
            "chains": matches.get("linear_chain", 0),
            "sums": [line.count("all_reduce") for line in graph.splitlines() if "all_reduce" in line].count(1) - of_embedding,
            "summed": [line.split("summed=")[1].split("]")[0] + "]" for line in graph.splitlines() if "summed=" in line],
            "left": left,
            "apart": float((result.double() - want.double()).norm() / want.double().norm()),
        }
        for result, matches, graph, left in (apart, together)
    ]
    ranks.write(found, out)
    ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
