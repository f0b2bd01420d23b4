"""Milliseconds a token of ``generate()``: this package's loop over its two caches beside Transformers' loop, and the seconds until the first token.

    python benchmarks/generate.py                                    # Qwen3-8B's size, batch 1 and 8
    python benchmarks/generate.py --model qwen3-30b --batch 1
    python benchmarks/generate.py --layers 8 --loops kv --profile    # fewer layers, one loop, the kernels of its steps
    python benchmarks/generate.py --loops kv --kv k8v4 --context 8192                    # a KVCache in another format
    python benchmarks/generate.py --batch 1 --loops kv --lookup 1 3 7      # prompt lookup where the answer repeats the prompt
    python benchmarks/generate.py --smoke                            # a tiny model on a CPU: does everything run?

Random weights, a random prompt of ``--context`` tokens, greedy tokens. ``ms`` is the median of ``(time of N tokens - time of one token) / (N - 1)``, the
loops taking turns: what a user waits for each further token. ``first_ms``: one token behind a prompt, everything compiled. ``first_use_s``: the first call.
``gap``: by how much at most a token of the first row was not the likeliest of an eager model that reads the same text, in standard deviations of the logits.
Compare it between loops: a model of random weights passes rounding on, so prompts in FP8 alone make about 0.7 of it (12 layers, rounded so on a CPU), bfloat16 .05.

Loops: ``kv`` is fp4_inductor.generate over a KVCache, ``static`` over a StaticCache, ``transformers`` is model.generate with cache_implementation="static".

``--slots N ...`` adds the loops ``kv slots N``: over a KVCache of N tokens, of which those of the others are used.

``--lookup K ...`` adds the loops ``kv lookup K``: prompt lookup with K drafts a step, for batch 1. The head is then set so that each token is followed by a
certain other one, the prompt is such a sequence, and the answer begins at its begin: all of it lies in the prompt (``--new`` below ``--context``).
``--wrong R`` puts another token into every R-th place of the prompt, where drafts are wrong then. ``tokens_per_step`` is what came of it, ``tokens_s`` tokens a second of a sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import decode
import kernels_of
import torch
import torch._inductor.config as inductor_config
from timing import machine, save

import fp4_inductor
from fp4_inductor import NVFP4Config

LOOPS = ("kv", "static", "transformers")


def follow(model: Any) -> torch.Tensor:
    """Give ``model`` a head by which each token is followed by a certain other one, whatever its layers add: int64 ``[V]``, all tokens in that order."""
    vectors = model.get_input_embeddings().weight.data.normal_(std=30.0)
    order = torch.randperm(vectors.shape[0], device=vectors.device)
    model.lm_head.weight.data[order.roll(-1)] = (vectors[order] / 30.0).to(model.lm_head.weight.dtype)
    return order


def loop_of(name: str, model: Any, length: int, batch: int, kv: str) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A function of a prompt and a number of tokens: the tokens ``[B, T + new]``."""
    if name == "transformers":
        return lambda ids, new: model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, cache_implementation="static")
    options = {"prompt_lookup_num_tokens": int(name.split()[-1])} if "lookup" in name else {}
    if name.startswith("kv"):
        slots = int(name.split()[-1]) if "slots" in name else length
        cache = fp4_inductor.KVCache(model, max(length, slots), batch, kv=kv)
    else:
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=length)

    def run(ids: torch.Tensor, new: int) -> torch.Tensor:
        cache.reset()
        return fp4_inductor.generate(model, ids, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None, **options)

    return run


def seconds(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


@torch.inference_mode()
def gap_of(model: Any, text: torch.Tensor, prompt: int) -> float:
    """See above; ``text`` ``[T]``."""
    logits = model(text[None, :-1], use_cache=False).logits[0, prompt - 1 :].float()
    chosen = logits.gather(1, text[prompt:, None])[:, 0]
    return float(((logits.amax(1) - chosen) / logits.std(1)).max())


def measure(model: Any, batch: int, args: argparse.Namespace, device: str, order: torch.Tensor | None) -> list[dict]:
    ids = torch.randint(0, min(1000, model.config.vocab_size), (batch, args.context), device=device)
    if order is not None:
        ids = torch.cat([order[: args.context - 1], order[:1]]).repeat(batch, 1)
        if args.wrong:
            ids[:, args.wrong : -1 : args.wrong] = order[-1]
    length = args.context + args.new + max(args.lookup, default=0)
    length = -(-length // 256) * 256
    runs, rows, gaps = {}, {}, {}
    for name in [*args.loops, *(f"kv slots {count}" for count in args.slots), *(f"kv lookup {count}" for count in args.lookup if batch == 1)]:
        runs[name] = loop_of(name, model, length, batch, args.kv)
        first, _ = seconds(lambda run=runs[name]: run(ids, 1), device)
        first_use, _ = seconds(lambda run=runs[name]: run(ids, args.new), device)
        _, result = seconds(lambda run=runs[name]: run(ids, args.new), device)
        gaps[name] = round(gap_of(model, result[0], args.context), 3)
        rows[name] = dict(first_use_s=round(first + first_use, 1), times=[], first=[], tokens_per_step=1.0)
        if name != "transformers":
            record = fp4_inductor.generation_record(model)
            print(name, record, flush=True)
            rows[name]["tokens_per_step"] = round((record.tokens - 1) / max(record.steps, 1), 2)
    for _ in range(args.rounds):
        for name, run in runs.items():
            one, _ = seconds(lambda run=run: run(ids, 1), device)
            all_, _ = seconds(lambda run=run: run(ids, args.new), device)
            rows[name]["times"].append((all_ - one) / (args.new - 1) * 1e3)
            rows[name]["first"].append(one * 1e3)
    found = []
    for name, row in rows.items():
        ms, first_ms = sorted(row["times"])[args.rounds // 2], sorted(row["first"])[args.rounds // 2]
        head = "" if args.lm_head == "bf16" else f" {args.lm_head} head"
        what = dict(model=f"{args.model}-shape x{model.config.num_hidden_layers} layers{head}", loop=name, pdl=args.pdl, candidates=" ".join(args.candidates))
        what |= dict(kv=args.kv if name.startswith("kv") else "bf16", batch=batch, context=args.context, new=args.new, wrong=args.wrong)
        figures = dict(ms=round(ms, 3), first_ms=round(first_ms, 2), first_use_s=row["first_use_s"], gap=gaps[name])
        figures |= dict(tokens_s=round(1e3 / ms, 1), tokens_per_step=row["tokens_per_step"])
        found.append(dict(machine(), **what, **figures))
        print(
            f"{name:12} batch {batch:3}: {ms:7.3f} ms a token, first token {first_ms:8.2f} ms, first use {row['first_use_s']:6.1f} s, "
            f"gap {gaps[name]}, {figures['tokens_s']} tokens a second, {figures['tokens_per_step']} a step",
            flush=True,
        )
    if args.profile and device == "cuda":
        for name in (n for n in runs if n != "transformers"):
            spans = kernels_of.spans_of(lambda run=runs[name]: run(ids, 17))
            step = [i for i, (kernel, *_) in enumerate(spans) if "argmax" in kernel.lower()]
            print(name, *kernels_of.table(spans[step[-2] + 1 : step[-1] + 1] if len(step) > 2 else spans[-400:], 40), sep="\n", flush=True)
    return found


def main() -> None:
    parser = decode.model_options(__doc__, [1, 8])
    parser.add_argument("--new", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--kv", default="bf16", help="the format of the KVCache")
    parser.add_argument("--slots", type=int, nargs="+", default=[], help="adds loops over a longer KVCache")
    parser.add_argument("--lookup", type=int, nargs="+", default=[], help="drafts a step: adds loops with prompt lookup")
    parser.add_argument("--wrong", type=int, default=0, help="with --lookup: the distance of wrong tokens in the prompt; 0: none is wrong")
    parser.add_argument("--candidates", nargs="*", default=[], help="kernels that are off by default")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step after the times")
    args = parser.parse_args()
    device = "cuda"
    if args.smoke:
        torch.set_num_threads(1)
        device, args.model, args.batch, args.context, args.new, args.rounds = "cpu", "tiny", [1], 16, 5, 1
    inductor_config.triton.enable_pdl = args.pdl
    fp4_inductor.set_dispatch(candidates=tuple(args.candidates))
    model = decode.build(args.model, args.layers, device)
    order = follow(model) if args.lookup else None
    fp4_inductor.quantize_model(model, NVFP4Config("amax", lm_head=args.lm_head), progress=False)
    rows = [row for batch in args.batch for row in measure(model, batch, args, device, order)]
    save(rows, "generate.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
