"""Talk to a quantized model; its answers stream from the device, all over one cache and so by one CUDA graph. Every turn reads the conversation anew.

python examples/chat.py                                        a small model that ships with the repository and goes on with your text
python examples/chat.py --model Qwen/Qwen3-8B --device cuda
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from _shared import load_model, quiet
from transformers import TextStreamer

import fp4_inductor


def turn_of(tokenizer, history: list[dict], said: str) -> list[int]:
    """The tokens of what is said, in the tokenizer's chat template if it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(said)
    history.append({"role": "user", "content": said})
    return tokenizer.encode(tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False), add_special_tokens=False)


def main(args: argparse.Namespace) -> int:
    model, tokenizer = load_model(args.model, args.device)
    fp4_inductor.quantize_model(model, progress=False)
    chat = bool(getattr(tokenizer, "chat_template", None))
    cache = fp4_inductor.KVCache(model, args.length)
    text: list[int] = []
    history: list[dict] = []
    for turns, line in enumerate(sys.stdin):
        turn = turn_of(tokenizer, history, line.rstrip("\n"))
        text = turn if chat else text + turn
        room = args.length - len(text)
        if room < 1:
            print("--- the cache is full")
            return 0
        cache.reset()  # a template may write earlier turns in another way; only tokens that are the same could stay
        ids = torch.tensor([text], device=model.device)
        begin = time.perf_counter()
        out = fp4_inductor.generate(
            model,
            ids,
            past_key_values=cache,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=min(args.tokens, room),
            do_sample=True,
            temperature=args.temperature,
            seed=args.seed + turns,  # the same draws for each turn would let it repeat itself
            pad_token_id=tokenizer.eos_token_id or 0,
        )
        text = out[0].tolist()
        answer = text[ids.shape[1] :]
        history.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        print(f"--- {len(answer) / (time.perf_counter() - begin):.1f} tokens/s; {fp4_inductor.generation_record(model)}\n", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="austen_dense", help="austen_dense, smollm2, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="of the cache, in tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first turn; each turn has the next one (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
