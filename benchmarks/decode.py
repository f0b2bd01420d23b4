"""Whole-model decode and prefill, bf16 against NVFP4, random weights: ``python benchmarks/decode.py [--model qwen3-30b] [--layers 36] ...``.

A Qwen3-8B- or Qwen3-30B-A3B-sized model (or fewer of its layers), Transformers, StaticCache, torch.compile. The dense experts run
``batched_mm`` for one token and ``grouped_mm`` for a prompt: the better one of Transformers in each case. Times are medians over CUDA
events; a decode step is one token of every sequence of the batch against a cache of ``--context`` positions.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from timing import RESULTS, machine, write_csv

import fp4_inductor

SHARED = dict(vocab_size=151936, num_attention_heads=32, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False)
MODELS = {
    "qwen3-8b": ("Qwen3", 36, dict(hidden_size=4096, intermediate_size=12288, num_key_value_heads=8)),
    "qwen3-30b": (
        "Qwen3Moe",
        48,
        dict(
            hidden_size=2048,
            intermediate_size=6144,
            num_key_value_heads=4,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
}


def build(name: str, layers: int):
    """The model on the GPU in bfloat16, weights random."""
    import transformers

    family, _, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SHARED, **sizes, num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        if p.dim() >= 2:
            p.data.normal_(std=0.02)
    return model


def median_ms(step, reset, count: int = 20) -> float:
    """Median of ``step()``; ``reset()`` runs before each, untimed."""
    for _ in range(4):
        reset()
        step()
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        reset()
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[count // 2]


@torch.inference_mode()
def measure(model, shape: str, name: str, mode: str, batches: list[int], context: int, prefill: int, layers: int) -> list[dict]:
    """Rows for one model and one compile mode."""
    from transformers import StaticCache

    rows = []
    for batch, tokens in [(b, 1) for b in batches] + ([(1, prefill)] if prefill else []):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        if getattr(model.config, "_experts_implementation", None) in ("batched_mm", "grouped_mm"):
            model.set_experts_implementation("batched_mm" if tokens == 1 else "grouped_mm")
        cache = StaticCache(config=model.config, max_cache_len=max(context, prefill) + 8)
        ids = torch.randint(0, 1000, (batch, tokens), device="cuda")
        positions = torch.arange(tokens, device="cuda") + (context if tokens == 1 else 0)
        # The cache allocates itself at its first use: outside the graphs, or replays would overwrite it.
        model(input_ids=ids[:, :1], past_key_values=cache, cache_position=positions[:1], position_ids=positions[None, :1], use_cache=True, logits_to_keep=1)
        forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)

        def step(forward=forward, ids=ids, cache=cache, positions=positions):
            torch.compiler.cudagraph_mark_step_begin()
            return forward(input_ids=ids, past_key_values=cache, cache_position=positions, position_ids=positions[None], use_cache=True, logits_to_keep=1)

        def reset(cache=cache, length=context if tokens == 1 else 0):
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)

        reset()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - begin
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(step, reset)
        peak = torch.cuda.max_memory_allocated() / 2**30
        rows.append(
            dict(machine(), model=f"{shape}-shape x{layers} layers", weights=name, mode=mode, batch=batch, tokens=tokens, ms=round(ms, 3), compile_s=round(compile_s, 1), peak_gib=round(peak, 2))
        )  # fmt: skip
        print(f"{name:6} {mode:16} batch {batch:3} tokens {tokens:5}: {ms:8.3f} ms, compile {compile_s:5.1f} s, peak {peak:.2f} GiB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="default: all of them")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--modes", nargs="+", default=["reduce-overhead", "max-autotune"])
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.csv")
    args = parser.parse_args()
    layers = args.layers or MODELS[args.model][1]
    model = build(args.model, layers)
    rows = []
    for mode in args.modes:
        rows += measure(model, args.model, "bf16", mode, args.batch, args.context, args.prefill, layers)
    begin = time.perf_counter()
    fp4_inductor.quantize_model(model, progress=False)
    torch.cuda.synchronize()
    weights = fp4_inductor.report(model).params
    print(f"quantize_model: {weights / 1e9:.2f} G weights in {time.perf_counter() - begin:.1f} s")
    for mode in args.modes:
        rows += measure(model, args.model, "nvfp4", mode, args.batch, args.context, args.prefill, layers)
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
