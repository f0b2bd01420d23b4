"""Quantize a model here and write it for vLLM, SGLang or TensorRT-LLM; then read it back and compare every weight.

python examples/quantize_and_export.py --out DIRECTORY
python examples/quantize_and_export.py --model meta-llama/Llama-3.1-8B --format compressed-tensors --out DIRECTORY --device cuda
"""

from __future__ import annotations

import argparse
import sys

import torch
from _shared import load_model, quiet

import fp4_inductor


def main(args: argparse.Namespace) -> int:
    model, tokenizer = load_model(args.model, args.device)
    # Servers fuse q/k/v and gate/up and have one global scale for each such family. With siblings="shared" the layers have it from the
    # start, and the export changes nothing; without, it rounds their block scales again and says what that costs.
    fp4_inductor.quantize_model(model, fp4_inductor.NVFP4Config(scale_search=args.scale_search, siblings="shared"))
    try:
        fp4_inductor.export_pretrained(model, args.out, args.format)
    except fp4_inductor.errors.FP4Error as refused:
        print(f"{args.model} was not exported: {refused}", file=sys.stderr)
        return 2
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(args.out)
    again = fp4_inductor.load_pretrained(args.out)
    same = different = 0
    for name, t in model.state_dict().items():
        equal = torch.equal(t.cpu().contiguous().flatten().view(torch.uint8), again.state_dict()[name].contiguous().flatten().view(torch.uint8))
        same, different = same + equal, different + (not equal)
    print(f"\n{args.out}: {args.format}; read back, {same} tensors are equal bit for bit and {different} are not", end="")
    print(" (global scales that compressed-tensors stores as reciprocals)" if different else "")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="austen_dense", help="austen_dense, austen_moe, smollm2, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--format", default="modelopt", choices=("modelopt", "compressed-tensors"))
    parser.add_argument("--scale-search", default="four_over_six", choices=("amax", "four_over_six", "mse"))
    parser.add_argument("--out", required=True, help="an empty or new directory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
