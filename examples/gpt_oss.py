"""Run gpt-oss from its MXFP4 checkpoint: no dequantization, no Blackwell needed.

    python examples/gpt_oss.py                                    a tiny random gpt-oss, written in OpenAI's layout first
    python examples/gpt_oss.py --model openai/gpt-oss-20b --device cuda

Each group of 32 weights with its power-of-two scale becomes two blocks of 16 under the same scale: the values are the same,
so the same kernels run them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from _shared import ByteTokenizer, generate, quiet

import fp4_inductor


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model or tiny_gpt_oss(Path(scratch))
        try:
            model = fp4_inductor.load_pretrained(path, device=args.device)
        except fp4_inductor.errors.FP4Error as refused:
            print(f"{path} was not loaded: {refused}", file=sys.stderr)
            return 2
    print(fp4_inductor.report(model))
    if args.model:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        tokenizer = ByteTokenizer()
    said = generate(model, tokenizer, tokenizer.encode(args.prompt), args.tokens, args.compile)
    print(f"\n{said.tokens_per_s:.1f} tokens/s\n--- {args.prompt}{said.text if args.model else ' ... (random weights)'}")
    return 0


def tiny_gpt_oss(directory: Path) -> str:
    """A random model of 2 layers in the layout of openai/gpt-oss-20b."""
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    from fp4_inductor.formats import mxfp4

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GptOssConfig(**sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256)
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).bfloat16()
    tensors = {}
    for name, t in model.state_dict().items():
        if t.dim() == 3:
            codes, scales = mxfp4.quantize(t.mT.contiguous())
            tensors |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)).contiguous(), f"{name}_scales": scales}
        else:
            tensors[name] = t.clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    body = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(body | {"quantization_config": {"quant_method": "mxfp4"}}))
    return str(directory)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub id, e.g. openai/gpt-oss-20b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--eager", dest="compile", action="store_false", help="without torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
