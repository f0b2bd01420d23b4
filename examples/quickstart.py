"""Quantize a language model to NVFP4, compile it, generate text, and see what it cost and what runs where.

    python examples/quickstart.py                       a 2 M parameter model that ships with the repository
    python examples/quickstart.py --model smollm2       SmolLM2-135M-Instruct
    python examples/quickstart.py --model PATH_OR_HUB_ID --device cuda
    python examples/quickstart.py --sparse              2:4-sparse NVFP4, on a model that was trained 2:4

Everything that is specific to fp4_inductor is in main(): quantize_model, report and explain.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import warnings

import torch
from _shared import ByteTokenizer, generate, held_out_text, load_model, score

import fp4_inductor
from fp4_inductor import Sparse24Config

NOVEL_PROMPT = (
    "They arrived at Bath. Catherine was all eager delight; her eyes were here,\nthere, everywhere, as they approached its fine and striking environs"
)
CHAT_PROMPT = "Explain in three sentences why the sky is blue."


def main(args: argparse.Namespace) -> int:
    args.model = args.model or ("austen_sparse24" if args.sparse else "austen_dense")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA device; run with --device cpu.", file=sys.stderr)
        return 2

    model, tokenizer = load_model(args.model, args.device)
    text = held_out_text()
    prompt, prompt_ids = prompt_for(tokenizer)
    small = isinstance(tokenizer, ByteTokenizer)
    windows, tokens = args.windows or (32 if small else 4), args.tokens or (200 if small else 64)
    how = "torch.compile" if args.compile else "eager"
    speed = not small if args.speed is None else args.speed
    calls = 3 if speed else 1
    print(f"{args.model} on {device_name(args.device)}, torch {torch.__version__}, {how}\n")

    # 1. The model as it is, in bfloat16.
    print("bf16: scoring, compiling, generating ..." if args.compile and speed else "bf16: scoring, generating ...", flush=True)
    nats_bf16, _, logits = score(model, tokenizer, text, windows)
    said_bf16 = generate(model, tokenizer, prompt_ids, tokens, args.compile and speed, calls)

    # 2. Every linear layer but the output head becomes NVFP4, in place. Then compile as before: nothing else changes.
    torch.compiler.reset()
    try:
        if args.sparse:
            quantize_sparse(model, tokenizer, text)
        else:
            fp4_inductor.quantize_model(model)
    except fp4_inductor.errors.FP4Error as refused:
        print(f"{args.model} was not quantized: {refused}", file=sys.stderr)
        return 2

    # 3. The same again.
    label = "2:4 NVFP4" if args.sparse else "NVFP4"
    print(f"\n{label}: scoring, compiling, generating ...\n" if args.compile else f"\n{label}: scoring, generating ...\n", flush=True)
    nats_fp4, kl, _ = score(model, tokenizer, text, windows, reference=logits)
    said_fp4 = generate(model, tokenizer, prompt_ids, tokens, args.compile, calls)

    show("prompt", prompt)
    show("bf16", said_bf16.text)
    show(label, said_fp4.text)
    report = fp4_inductor.report(model)
    rows = [("bf16", nats_bf16, "", report.bytes_before, said_bf16), (label, nats_fp4, f"{kl:.4f}", report.bytes_after, said_fp4)]
    print(f"{'':9} {'nats/byte':>10} {'KL':>8} {'MB':>8}" + (f" {'tokens/s':>9} {'first call':>11}" if speed else ""))
    for name, nats, divergence, size, said in rows:
        timed = f" {said.tokens_per_s:9.1f} {said.first_call_s:9.1f} s" if speed else ""
        print(f"{name:9} {nats:10.4f} {divergence:>8} {size / 1e6:8.2f}{timed}")
    print(f"\n{label} costs {nats_fp4 - nats_bf16:+.4f} nats per byte on {windows} x 512 tokens of held-out text.", end=" ")
    if speed:
        print("tokens/s: batch 1, generate() under a StaticCache, best of two calls after the first; the first includes compilation.\n")
    else:
        print("Speed says nothing at this size: the weights fit into a cache. --speed shows it; benchmarks/README.md has large models.\n")

    # 4. What runs where: one decode step, and the prompt (which generate() runs eagerly).
    ids = torch.tensor([prompt_ids], device=model.device)
    print(f"explain: one decode step, {how}\n{fp4_inductor.explain(torch.compile(model) if args.compile else model, ids[:, :1])}\n")
    print(f"explain: the prompt, eager\n{fp4_inductor.explain(model, ids)}")
    return 0


def quantize_sparse(model, tokenizer, text: str) -> None:
    """2:4-sparse NVFP4: weights that were trained 2:4 stay what they are; others are pruned, which costs, as the report says."""
    try:
        fp4_inductor.quantize_model(model, Sparse24Config())
    except fp4_inductor.errors.SparsityError:
        print("not a 2:4 model: pruning it one-shot by SparseGPT; examples/recover_sparse.py goes on from there")
        ids = torch.tensor(tokenizer.encode(text[len(text) // 2 :])[: 64 * 512], device=model.device)  # the second half is not scored
        batches = ids[: len(ids) // 512 * 512].view(-1, 512).split(4)
        fp4_inductor.quantize_model(model, Sparse24Config("sparsegpt", calibration=list(batches)))


def prompt_for(tokenizer) -> tuple[str, list[int]]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template([{"role": "user", "content": CHAT_PROMPT}], add_generation_prompt=True, tokenize=False)
        return text, tokenizer.encode(text, add_special_tokens=False)  # the template has them
    return NOVEL_PROMPT, tokenizer.encode(NOVEL_PROMPT)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({torch.get_num_threads()} threads)"


def show(title: str, text: str) -> None:
    print(f"--- {title}\n{textwrap.indent(text.strip(), '    ')}\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="smollm2, a folder or a hub id (default: austen_dense, with --sparse austen_sparse24)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default here: %(default)s)")
    parser.add_argument("--sparse", action=argparse.BooleanOptionalAction, default=False, help="2:4-sparse NVFP4 instead of dense")
    parser.add_argument("--dense", dest="sparse", action="store_false", help="dense NVFP4 (the default)")
    parser.add_argument("--compile", action="store_true", default=True, help="run under torch.compile (the default)")
    parser.add_argument("--eager", dest="compile", action="store_false", help="run without torch.compile")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, help="time generate(), bf16 compiled, too (default: not for the byte-level models)")
    parser.add_argument("--tokens", type=int, default=0, help="tokens to generate (default: 200 for the byte-level models, else 64)")
    parser.add_argument("--windows", type=int, default=0, help="windows of 512 held-out tokens to score (default: 32 for the byte-level models, else 4)")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sys.exit(main(arguments()))
