"""Fine-tune a quantized language model with LoRA: the FP4 weights stay frozen, small adapters beside them are trained.

    python examples/finetune_lora.py                                a 2 M parameter model that ships with the repository, a minute on a CPU
    python examples/finetune_lora.py --model smollm2 --steps 100    SmolLM2-135M-Instruct
    python examples/finetune_lora.py --model PATH_OR_HUB_ID --device cuda --text FILE --out FOLDER

The adapters are PEFT's: get_peft_model, save_pretrained and PeftModel.from_pretrained work as on any other model. Needs
``pip install peft``. Everything that is specific to fp4_inductor is one call, quantize_model.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from _shared import held_out_text, load_model, quiet, score

import fp4_inductor

WINDOW = 256


def main(args: argparse.Namespace) -> int:
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError:
        print("This example needs peft: pip install peft", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    model, tokenizer = load_model(args.model, args.device)
    text = Path(args.text).read_text() if args.text else held_out_text()
    cut = len(text) * 4 // 5
    train_ids, held_out = torch.tensor(tokenizer.encode(text[:cut]), device=args.device), text[cut:]

    # 1. Quantize, then put adapters on every linear layer but the output head.
    fp4_inductor.quantize_model(model)
    model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"\n{args.model}: training {trained:,} adapter weights beside the quantized ones, {args.steps} steps of {args.batch} x {WINDOW} tokens")

    before, _, _ = score(model, tokenizer, held_out, args.windows)
    print(f"held-out loss before: {before:.4f} nats per byte", flush=True)

    # 2. Train. Nothing here knows of FP4; Transformers' Trainer would do as well.
    train(model, train_ids, args)

    after, _, logits = score(model, tokenizer, held_out, args.windows)
    print(f"held-out loss after:  {after:.4f} nats per byte ({after - before:+.4f})")

    # 3. Save the adapters, and load them onto a freshly quantized model: the base weights are not in the folder.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.out or scratch)
        model.save_pretrained(folder)
        size = sum(f.stat().st_size for f in folder.glob("adapter_model*"))
        base, _ = load_model(args.model, args.device)
        fp4_inductor.quantize_model(base, progress=False)
        again = PeftModel.from_pretrained(base, folder)
        _, kl, _ = score(again, tokenizer, held_out, 1, reference=logits)
    print(f"adapters saved ({size / 1e6:.2f} MB) and loaded again: KL to the trained model {abs(kl):.6f}")
    return 0 if after < before else 1


def train(model, ids: torch.Tensor, args: argparse.Namespace) -> None:
    """AdamW on random windows; the learning rate falls linearly to zero."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.steps)
    pick, start = random.Random(0), time.perf_counter()
    model.train()
    for step in range(args.steps):
        starts = [pick.randrange(len(ids) - WINDOW) for _ in range(args.batch)]
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, args.steps // 5) == 0:
            print(f"  step {step + 1:4}  loss {loss.item():.4f}  {time.perf_counter() - start:5.1f} s", flush=True)
    model.eval()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="austen_dense", help="austen_dense, smollm2, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--text", help="a text file: its first four fifths are trained on, the rest is held out (default: a novel that ships with the models)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default here: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 held-out tokens to score (default: %(default)s)")
    parser.add_argument("--out", help="folder for the adapters (default: a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    sys.exit(main(arguments()))
