"""Load a checkpoint that another library quantized, compile it, generate text.

    python examples/load_nvfp4_checkpoint.py                    writes a small ModelOpt checkpoint first, and loads that
    python examples/load_nvfp4_checkpoint.py PATH_OR_HUB_ID     ModelOpt, compressed-tensors, torchao, gpt-oss, a .gguf file
    python examples/load_nvfp4_checkpoint.py nvidia/Llama-3.1-8B-Instruct-FP4 --device cuda

Transformers alone does the same for ModelOpt: import fp4_inductor, then AutoModelForCausalLM.from_pretrained(path).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import torch
from _shared import ByteTokenizer, generate, load_model, quiet

import fp4_inductor


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = args.checkpoint or small_checkpoint(scratch, args.small)
        start = time.perf_counter()
        try:
            model = fp4_inductor.load_pretrained(path, device=args.device)
        except fp4_inductor.errors.FP4Error as refused:
            print(f"{path} was not loaded: {refused}", file=sys.stderr)
            return 2
        seconds = time.perf_counter() - start
    report = fp4_inductor.report(model)
    print(report)
    print(f"\nloaded {report.bytes_after / 1e6:.1f} MB in {seconds:.2f} s")
    tokenizer = ByteTokenizer() if model.config.vocab_size == 256 else auto_tokenizer(path)
    said = generate(model, tokenizer, tokenizer.encode(args.prompt), args.tokens, args.compile)
    print(f"{said.tokens_per_s:.1f} tokens/s\n--- {args.prompt}{said.text}")
    return 0


def small_checkpoint(directory: str, name: str) -> str:
    """A ModelOpt checkpoint of an embedded model, as ModelOpt would have written it."""
    model, _ = load_model(name, "cpu")
    fp4_inductor.export_pretrained(fp4_inductor.quantize_model(model, progress=False), directory, "modelopt")
    return directory


def auto_tokenizer(path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--small", default="austen_dense", choices=("austen_dense", "austen_moe"), help="embedded model to use without a checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="They arrived at Bath. Catherine was all eager delight")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--eager", dest="compile", action="store_false", help="without torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
