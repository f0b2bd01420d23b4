"""An hour's traffic in minutes (``--slow``): random requests against one engine, some of them dropped."""

from __future__ import annotations

import gc
import random

import psutil
import pytest

from lowering_tests.vllm.served import engine

REQUESTS, AT_ONCE, GROWTH = 1000, 16, 64 << 20
TIE = 1e-3  # nats, in float32


@pytest.mark.slow
def test_a_thousand_requests(folders):
    """Memory stays, no request is lost, each answer is the one that the request gets alone, or differs from a tie on."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(1, 256) for _ in range(rng.randrange(1, 48))] for _ in range(40)]
    lengths = [rng.randrange(1, 40) for _ in prompts]
    with engine(folders("dense-modelopt"), quantization="fp4_inductor", dtype="float32", max_num_seqs=AT_ONCE) as served:
        core = served.llm.llm_engine

        def params(tokens: int) -> SamplingParams:
            return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=2)

        alone = [served.ask([p], n)[0] for p, n in zip(prompts, lengths, strict=True)]
        running: dict[str, int] = {}
        done, dropped, ties, sent, sizes = 0, 0, 0, 0, []
        while sent < REQUESTS or running:
            while sent < REQUESTS and len(running) < AT_ONCE + 8:
                which = rng.randrange(len(prompts))
                core.add_request(str(sent), {"prompt_token_ids": prompts[which]}, params(lengths[which]))
                running[str(sent)] = which
                sent += 1
            if running and rng.random() < 0.05:
                name = rng.choice(sorted(running))
                core.abort_request([name])
                del running[name]
                dropped += 1
            for out in core.step():
                if not out.finished or out.request_id not in running:
                    continue
                which = running.pop(out.request_id)
                done += 1
                tokens = list(out.outputs[0].token_ids)
                want, top = alone[which]
                assert len(tokens) == len(want)
                if tokens != want:
                    first = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
                    one, two = sorted(top[first].values(), reverse=True)[:2]
                    assert one - two <= TIE, (which, first, one - two)
                    ties += 1
            if done % 100 == 50:
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss)
        assert done + dropped == REQUESTS
        assert dropped > 10
        assert not core.has_unfinished_requests()
        assert max(sizes) - sizes[len(sizes) // 3] < GROWTH, sizes
        print(f"{done} answered, {dropped} dropped, {ties} from a tie on; {sizes[0] >> 20} to {sizes[-1] >> 20} MiB")
