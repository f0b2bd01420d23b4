"""Greedy tokens and top logprobs of a folder: by vLLM in this process, and by ``load_pretrained`` with Transformers' ``generate()``."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PROMPTS = [[1, 5, 9, 20, 33], [7, 8, 9], [1, 100, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [64]]
TOKENS = 24
# A bfloat16 step of logits of this size: where the first two are nearer than that, engines may differ.
TIE = 0.07

Answer = tuple[list[int], list[dict[int, float]]]


def environment() -> None:
    """Of this process, before vLLM is imported: one process, no network, little memory."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "fp4_inductor",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


def in_process() -> bool:
    """Is an engine's worker this process, so that a test sees its model and what was compiled? vLLM 0.22 makes one of its own on a CPU."""
    import vllm

    return tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 32)


class Served:
    """An engine in this process; ``llm`` is ``vllm.LLM``, None when it is closed."""

    def __init__(self, llm: Any):
        self.llm = llm

    @property
    def model(self) -> torch.nn.Module:
        """What it runs; only where :func:`in_process`."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    @property
    def caches(self) -> list[torch.Tensor]:
        """The KV cache of each layer; only where :func:`in_process`."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches

    def ask(self, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS, **options: Any) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=5)
        outs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, **options)
        return [(list(o.outputs[0].token_ids), [{t: p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs]) for o in outs]


@contextmanager
def _short_collections() -> Iterator[None]:
    """Python's collector looks at what is made inside alone. vLLM calls it ten times for an engine, and over all that is imported a call takes 0.2 s."""
    gc.freeze()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        yield


@contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[Served]:
    """``vllm.LLM`` of a folder without a tokenizer. Everything it held is free afterwards: an engine that dies later takes the groups of the next."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 96, "dtype": "bfloat16", "max_num_seqs": 8, "max_num_batched_tokens": 96,
        "disable_log_stats": True, "max_logprobs": 5, "seed": 0, "enable_prefix_caching": False, "distributed_executor_backend": "uni",
        "num_gpu_blocks_override": 64,  # of 128 tokens: a gibibyte of zeros takes a second
    } | options  # fmt: skip
    served = None
    with _short_collections():
        try:
            served = Served(LLM(model=str(folder), **options))
            yield served
        finally:
            if served is not None:
                served.llm = None
            gc.collect()  # what an engine that was refused leaves, too
            cleanup_dist_env_and_memory()
            if not options["enforce_eager"]:  # what a sampler compiled serves the next engine
                torch._dynamo.reset()


def by_transformers(model: Any, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS, cache: Callable[[], Any] | None = None) -> list[Answer]:
    """``cache`` makes the ``past_key_values`` of an answer; None: as ``generate()`` does."""
    model.eval()
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
            pad_token_id=0, past_key_values=None if cache is None else cache(),
        )  # fmt: skip
        top = []
        for logits in out.logits:
            best = logits[0].float().log_softmax(-1).topk(5)
            top.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        answers.append((out.sequences[0, len(prompt) :].tolist(), top))
    return answers


def differences(got: list[Answer], want: list[Answer]) -> tuple[list[int], float, list[float]]:
    """(tokens in common of each answer, the largest difference of a logprob up to there, how near the first two are where tokens part)."""
    common, worst, gaps = [], 0.0, []
    for (tokens, top), (other, other_top) in zip(got, want, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))
        common.append(same)
        steps = zip(top[: same + 1], other_top[: same + 1], strict=True)
        worst = max([worst, *(abs(p[t] - q[t]) for p, q in steps for t in p.keys() & q.keys())])
        if same < len(tokens):
            first, second = sorted(other_top[same].values(), reverse=True)[:2]
            gaps.append(first - second)
    return common, worst, gaps


def assert_same(got: list[Answer], want: list[Answer], logprobs: float) -> list[int]:
    """Tokens are equal up to the first tie of the other engine, and logprobs are within ``logprobs`` nats up to there."""
    common, worst, gaps = differences(got, want)
    assert worst <= logprobs, (common, worst, gaps)
    assert all(gap <= TIE for gap in gaps), (common, worst, gaps)
    assert sum(n == len(tokens) for n, (tokens, _) in zip(common, got, strict=True)) * 2 >= len(got), (common, gaps)
    return common
