"""Whole-model decode and prefill, bf16 against NVFP4, random weights: ``python benchmarks/decode.py [--layers 36] ...``.

A Qwen3-8B-sized model (or fewer of its layers), Transformers, StaticCache, torch.compile. Times are medians over CUDA
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


def build(layers: int):
    """The model on the GPU in bfloat16, weights random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        if p.dim() == 2:
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
def measure(model, name: str, mode: str, batches: list[int], context: int, prefill: int, layers: int) -> list[dict]:
    """Rows for one model and one compile mode."""
    from transformers import StaticCache

    rows = []
    for batch, tokens in [(b, 1) for b in batches] + ([(1, prefill)] if prefill else []):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
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
            dict(machine(), model=f"qwen3-8b-shape x{layers} layers", weights=name, mode=mode, batch=batch, tokens=tokens, ms=round(ms, 3), compile_s=round(compile_s, 1), peak_gib=round(peak, 2))
        )  # fmt: skip
        print(f"{name:6} {mode:16} batch {batch:3} tokens {tokens:5}: {ms:8.3f} ms, compile {compile_s:5.1f} s, peak {peak:.2f} GiB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--modes", nargs="+", default=["reduce-overhead", "max-autotune"])
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.csv")
    args = parser.parse_args()
    model = build(args.layers)
    rows = []
    for mode in args.modes:
        rows += measure(model, "bf16", mode, args.batch, args.context, args.prefill, args.layers)
    begin = time.perf_counter()
    fp4_inductor.quantize_model(model, progress=False)
    torch.cuda.synchronize()
    weights = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, fp4_inductor.FP4Linear))
    print(f"quantize_model: {weights / 1e9:.2f} G weights in {time.perf_counter() - begin:.1f} s")
    for mode in args.modes:
        rows += measure(model, "nvfp4", mode, args.batch, args.context, args.prefill, args.layers)
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
