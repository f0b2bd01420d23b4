"""Quantize a mixture of experts, routed experts included, and generate with a StaticCache under torch.compile.

python examples/generate_moe.py                                        a small model that ships with the repository
python examples/generate_moe.py --model Qwen/Qwen3-30B-A3B --device cuda
"""

from __future__ import annotations

import argparse
import sys

import torch
from _shared import generate, load_model, quiet

import fp4_inductor


def main(args: argparse.Namespace) -> int:
    model, tokenizer = load_model(args.model, args.device)
    fp4_inductor.quantize_model(model)
    experts = [layer for layer in fp4_inductor.report(model).layers if len(layer.shape) == 3]
    share = sum(layer.params for layer in experts) / fp4_inductor.report(model).params
    print(f"\n{len(experts)} weights of routed experts in FP4: {100 * share:.1f} % of all quantized parameters")
    ids = tokenizer.encode(args.prompt)
    said = generate(model, tokenizer, ids, args.tokens, args.compile)
    print(f"{said.tokens_per_s:.1f} tokens/s\n--- {args.prompt}{said.text}\n")
    if args.compile:
        step = torch.tensor([ids[:1]], device=model.device)
        print(f"explain: one decode step\n{fp4_inductor.explain(torch.compile(model), step)}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="austen_moe", help="austen_moe, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="They arrived at Bath. Catherine was all eager delight")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--eager", dest="compile", action="store_false", help="without torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
