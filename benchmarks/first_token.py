"""Milliseconds until the first token of ``generate()``: prompts that are padded and replayed beside prompts that run as they are.

    python benchmarks/first_token.py                                 # Qwen3-8B's size
    python benchmarks/first_token.py --model qwen3-30b --tokens 20 512 --held 0
    python benchmarks/first_token.py --smoke                         # a tiny model on a CPU: does everything run?

Random weights, prompts of ``--tokens`` random tokens behind ``--held`` others that the cache holds; ``generate(..., max_new_tokens=1)`` from the call to the
token on the host, medians of ``--rounds``, both ways taking turns. ``gpu_ms``: what the GPU computes of a prompt that runs as it is. ``first_use_s``: the
first call with that many tokens. With ``--forward`` the compiled model alone runs that prompt, ``forward_ms``, and ``gap`` is by how much the token of the
padded prompt is less likely by its logits, in their standard deviations.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

import decode
import kernels_of
import torch
from generate import seconds
from timing import machine, save

import fp4_inductor
from fp4_inductor import NVFP4Config


def measure(model: Any, compiled: Any, cache: Any, held: int, tokens: int, args: Any, device: str) -> list[dict]:
    vocabulary, batch = min(1000, model.config.vocab_size), cache.batch
    ids = torch.randint(0, vocabulary, (batch, held + tokens), device=device)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def prepared() -> None:
        cache.reset()
        if held:
            model(ids[:, :held], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def call(pad: bool) -> list[list[int]]:
        options = dict(attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False, eos_token_id=None)
        return fp4_inductor.generate(model, ids, pad_prompts=pad, **options).tolist()

    def once(pad: bool) -> tuple[float, list[list[int]]]:
        prepared()
        return seconds(lambda: call(pad), device)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        with nullcontext() if held else cache.from_empty():
            return compiled(input_ids=ids[:, held:], past_key_values=cache, use_cache=True, logits_to_keep=1)

    use = {}
    for pad in (False, True):
        use[pad] = once(pad)[0]
        for _ in range(2):
            once(pad)
        print(f"{tokens} tokens behind {held}, {use[pad]:.1f} s:", fp4_inductor.generation_record(model), flush=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for pad, found in times.items():
            found.append(once(pad)[0] * 1e3)
    text = once(True)[1]
    alone = []
    for _ in range(args.rounds + 1 if tokens in args.forward else 0):
        prepared()
        spent, logits = seconds(forward, device)
        alone.append(spent * 1e3)
    gap, forward_ms = "", ""
    if alone:
        scores = logits[0].float()
        gap = round(float((scores.max() - scores[text[0][-1]]) / scores.std()), 3)
        forward_ms = round(statistics.median(alone[1:]), 2)
    gpu_ms = round(sum(end - begin for _, begin, end in kernels_of.spans_of(lambda: call(False), prepared)) / 1e3, 2) if device == "cuda" else ""
    rows = []
    for pad, found in times.items():
        what = dict(model=f"{args.model}-shape x{model.config.num_hidden_layers} layers", prompt="padded" if pad else "as it is")
        what |= dict(batch=batch, held=held, tokens=tokens)
        figures = dict(ms=round(statistics.median(found), 2), forward_ms=forward_ms, gpu_ms=gpu_ms, first_use_s=round(use[pad], 1), gap=gap if pad else "")
        rows.append(dict(machine(), **what, **figures))
        print(" ".join(f"{name}={value}" for name, value in (what | figures).items()), flush=True)
    return rows


def main() -> None:
    parser = decode.model_options(__doc__, [1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[20, 128, 300, 512, 1000, 2048])
    parser.add_argument("--held", type=int, nargs="+", default=[0, 512])
    parser.add_argument("--slots", type=int, default=4096, help="of the KVCache")
    parser.add_argument("--forward", type=int, nargs="*", default=[], help="of --tokens: measure the compiled model alone with them, too")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = "cuda"
    if args.smoke:
        torch.set_num_threads(1)
        device, args.model, args.batch, args.tokens, args.held, args.rounds = "cpu", "tiny", [1], [7], [0, 5], 1
    model = decode.build(args.model, args.layers, device)
    fp4_inductor.quantize_model(model, NVFP4Config("amax", lm_head=args.lm_head), progress=False)

    def last_logits(**inputs: Any) -> torch.Tensor:
        return model(**inputs, return_dict=True).logits[:, -1]

    compiled = torch.compile(last_logits, fullgraph=True) if device == "cuda" else last_logits
    rows = []
    for batch in args.batch:
        cache = fp4_inductor.KVCache(model, min(args.slots, model.config.max_position_embeddings), batch)
        for held in args.held:
            for tokens in args.tokens:
                rows += measure(model, compiled, cache, held, tokens, args, device)
                save(rows, "first_token.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
