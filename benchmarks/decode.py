"""Whole-model decode and prefill, bf16 against NVFP4, random weights.

    python benchmarks/decode.py                             # Qwen3-8B's size, batch 1, 8, 32, prefill of 2048 tokens
    python benchmarks/decode.py --layers 8 --lm-head fp8    # fewer layers; the output head quantized too
    python benchmarks/decode.py --model qwen3-30b           # a mixture of experts, Qwen3-30B-A3B's size
    python benchmarks/decode.py --smoke                     # a tiny model on a CPU: does everything run?

Transformers, StaticCache, torch.compile. Times are medians; a decode step is one token of every sequence of the batch
against a cache of ``--context`` positions and those decoded since. ``ms``: of a step among ``IN_A_ROW`` that follow one
another, as they do until somebody reads a token; of a prompt alone. ``ms_alone``: of one that begins on an idle GPU, where the
host's part of it (guards, inputs, the launch) shows. ``compile_s`` is the first call, ``peak_gib`` the largest allocation while
measuring. The dense experts of a mixture run ``batched_mm`` for one token and ``grouped_mm`` for a prompt: the better one
of Transformers in each case.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import kernels_of
import torch
import torch._inductor.config as inductor_config
from timing import machine, save

import fp4_inductor
from fp4_inductor import NVFP4Config

IN_A_ROW = 16
QWEN3 = dict(vocab_size=151936, num_attention_heads=32, head_dim=128)
EXPERTS = dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
# name -> (family, layers, sizes)
MODELS = {
    "qwen3-8b": ("Qwen3", 36, QWEN3 | dict(hidden_size=4096, intermediate_size=12288, num_key_value_heads=8)),
    "qwen3-30b": ("Qwen3Moe", 48, QWEN3 | EXPERTS | dict(hidden_size=2048, intermediate_size=6144, num_key_value_heads=4)),
    "70b": ("Qwen3", 80, QWEN3 | dict(vocab_size=128256, num_attention_heads=64, hidden_size=8192, intermediate_size=28672, num_key_value_heads=8)),
    "tiny": ("Qwen3", 1, dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
}


def build(name: str, layers: int, device: str):
    """The model in bfloat16, weights random."""
    import transformers

    family, depth, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, num_hidden_layers=layers or depth, max_position_embeddings=8192, tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        if p.dim() >= 2:
            p.data.normal_(std=0.02)
    return model


def median_ms(step, reset, device: str, count: int, in_a_row: int = 1) -> float:
    """Median of ``step()``, of so many in a row; ``reset()`` runs before those, untimed."""
    for _ in range(4 if device == "cuda" else 1):
        reset()
        step()
    times = []
    for _ in range(count):
        reset()
        if device == "cuda":
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(in_a_row):
                step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / in_a_row)
        else:
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[count // 2]


@torch.inference_mode()
def measure(model, weights: str, mode: str, args, device: str) -> list[dict]:
    """Rows for one model and one compile mode."""
    from transformers import StaticCache

    rows = []
    label = f"{mode}, pdl" if args.pdl else mode
    for batch, tokens in [(b, 1) for b in args.batch] + ([(1, args.prefill)] if args.prefill else []):
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if getattr(model.config, "_experts_implementation", None) in ("batched_mm", "grouped_mm"):
            model.set_experts_implementation("batched_mm" if tokens == 1 else "grouped_mm")
        cache = StaticCache(config=model.config, max_cache_len=(args.context if tokens == 1 else tokens) + IN_A_ROW)
        ids = torch.randint(0, min(1000, model.config.vocab_size), (batch, tokens), device=device)
        positions = torch.arange(tokens, device=device) + (args.context if tokens == 1 else 0)
        # The cache allocates itself at its first use: outside the graphs, or replays would overwrite it.
        model(input_ids=ids[:, :1], past_key_values=cache, cache_position=positions[:1], position_ids=positions[None, :1], use_cache=True, logits_to_keep=1)
        forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)

        def step(forward=forward, ids=ids, cache=cache, positions=positions):
            torch.compiler.cudagraph_mark_step_begin()
            return forward(input_ids=ids, past_key_values=cache, cache_position=positions, position_ids=positions[None], use_cache=True, logits_to_keep=1)

        def reset(cache=cache, length=args.context if tokens == 1 else 0):
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)

        reset()
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        compile_s = time.perf_counter() - begin
        peak = 0.0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        alone = ms = median_ms(step, reset, device, 20 if device == "cuda" else 3)
        if tokens == 1 and device == "cuda":
            ms = median_ms(step, reset, device, 5, IN_A_ROW)
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        name = f"{args.model}-shape x{model.config.num_hidden_layers} layers"
        figures = dict(
            ms=round(ms, 3), ms_alone=round(alone, 3), tokens_per_s=round(batch * tokens * 1e3 / ms, 1), compile_s=round(compile_s, 1), peak_gib=round(peak, 2)
        )
        rows.append(dict(machine(), model=name, weights=weights, mode=label, batch=batch, tokens=tokens, context=args.context, **figures))
        print(
            f"{weights:18} {label:16} batch {batch:3} tokens {tokens:5}: {ms:8.3f} ms, alone {alone:8.3f}, compile {compile_s:5.1f} s, peak {peak:.2f} GiB",
            flush=True,
        )
        if args.profile and device == "cuda":
            print(*kernels_of.table(kernels_of.spans_of(step, reset)), sep="\n", flush=True)
    return rows


def compare(rows: list[dict]) -> list[str]:
    """Lines ``weights, batch, tokens: times faster than bf16`` in the better mode of each."""
    best: dict[tuple, float] = {}
    for row in rows:
        key = (row["weights"], row["batch"], row["tokens"])
        best[key] = min(best.get(key, row["ms"]), row["ms"])
    return [
        f"{weights} batch {batch} tokens {tokens}: {best['bf16', batch, tokens] / ms:.2f}x bf16, each in its better mode"
        for (weights, batch, tokens), ms in best.items()
        if weights != "bf16" and ("bf16", batch, tokens) in best
    ]


def model_options(description: str | None, batch: list[int]) -> argparse.ArgumentParser:
    """A parser of what every benchmark of a whole model takes: which model, which calls of it, and where the figures go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="default: all of them")
    parser.add_argument("--batch", type=int, nargs="*", default=batch)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lm-head", default="bf16", choices=("bf16", "nvfp4", "fp8"))
    parser.add_argument(
        "--pdl", action="store_true", help="programmatic dependent launch of Inductor's own kernels, too: torch._inductor.config.triton.enable_pdl"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = model_options(__doc__, [1, 8, 32])
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--modes", nargs="+", default=["reduce-overhead", "max-autotune"])
    parser.add_argument("--siblings", default="packed", choices=("packed", "shared", "separate"))
    parser.add_argument("--attention", default="auto", choices=("auto", "keep"), help="of the quantized model; the bf16 one runs Transformers' own")
    parser.add_argument("--skip", action="append", default=[], choices=("bf16", "nvfp4"), help="do not measure these weights")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step after its time; writes no figures: steps behind the first profile are slower"
    )
    args = parser.parse_args()
    device = "cuda"
    if args.smoke:
        torch.set_num_threads(1)
        device, args.model, args.batch, args.prefill, args.context, args.modes = "cpu", "tiny", [1], 0, 16, ["default"]
    if args.pdl:
        inductor_config.triton.enable_pdl = True
    model = build(args.model, args.layers, device)
    rows = []
    for mode in args.modes if "bf16" not in args.skip else ():
        rows += measure(model, "bf16", mode, args, device)
    begin = time.perf_counter()
    fp4_inductor.quantize_model(model, NVFP4Config("four_over_six", lm_head=args.lm_head, siblings=args.siblings, attention=args.attention), progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    quantized = fp4_inductor.report(model).params
    print(f"quantize_model: {quantized / 1e9:.2f} G weights in {time.perf_counter() - begin:.1f} s")
    options = [f"{args.lm_head} head"] if args.lm_head != "bf16" else []
    options += [args.siblings] if args.siblings != "packed" else []
    options += ["sdpa"] if args.attention == "keep" else []
    for mode in args.modes if "nvfp4" not in args.skip else ():
        rows += measure(model, ", ".join(["nvfp4", *options]), mode, args, device)
    print(*compare(rows), sep="\n")
    if not args.profile:
        save(rows, "decode.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
