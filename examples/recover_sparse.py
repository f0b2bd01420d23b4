"""Prune a language model to 2:4-sparse NVFP4, then train what is left to speak like the dense model again.

    python examples/recover_sparse.py                                a 2 M parameter model that ships with the repository, minutes on a CPU
    python examples/recover_sparse.py --model smollm2 --device cuda  SmolLM2-135M-Instruct
    python examples/recover_sparse.py --model PATH_OR_HUB_ID --text FILE --steps 2000 --save FOLDER

Distillation: the loss is the divergence of the sparse model's next-token distribution from the dense model's, on text that is
not evaluated. The pattern stays; the kept values and the block scales move, rounded to E2M1 and E4M3 in every forward pass, with
the gradient passed straight through the rounding. What is measured, and saved, is the packed FP4 model. ``fp4_inductor.recover`` is the
same for a model that is quantized already, dense or sparse.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from _shared import held_out_text, load_model
from torch import Tensor

import fp4_inductor
from fp4_inductor import Sparse24Config
from fp4_inductor.models.distil import Rates, distil

WINDOW = 512


def windows(tokenizer, text: str) -> Tensor:
    """``[count, 513]`` token ids."""
    ids = torch.tensor(tokenizer.encode(text))
    return ids[: (len(ids) - 1) // WINDOW * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW)


@torch.no_grad()
def perplexity(model, rows: Tensor) -> float:
    """Per token."""
    nats = sum(F.cross_entropy(model(input_ids=r[None, :-1].to(model.device), use_cache=False).logits[0].float(), r[1:].to(model.device)).item() for r in rows)
    return math.exp(nats / len(rows))


def main(args: argparse.Namespace) -> int:
    torch.manual_seed(0)
    model, tokenizer = load_model(args.model, args.device)
    model = model.float() if model.config.vocab_size == 256 else model  # the embedded models are small enough for float32
    text = Path(args.text).read_text() if args.text else held_out_text()
    rows = windows(tokenizer, text)
    evaluated = min(args.windows, len(rows) // 4)
    held_out, rest = rows[:evaluated], rows[evaluated + 1 :]
    print(f"{args.model} on {args.device}: {evaluated * WINDOW} tokens to evaluate, {len(rest) * WINDOW} others to calibrate and train on")

    dense = perplexity(model, held_out)
    teacher = copy.deepcopy(model).requires_grad_(False)
    calibration = rest[:: max(1, len(rest) // args.calibration)][: args.calibration, :-1].to(args.device)
    try:
        fp4_inductor.quantize_model(model, Sparse24Config(args.pruning, calibration=list(calibration.split(4))), progress=args.progress)
    except fp4_inductor.errors.FP4Error as refused:
        print(f"{args.model} was not pruned: {refused}", file=sys.stderr)
        return 2
    pruned = perplexity(model, held_out)
    print(f"perplexity: dense {dense:.3f}, 2:4 NVFP4 by {args.pruning} {pruned:.3f} (x{pruned / dense:.2f}); training ...", flush=True)
    start = time.monotonic()
    rates = Rates(args.lr, args.lr, 0.0)
    done = distil(model, teacher, rest[:, :-1], steps=args.steps, batch=args.batch, rates=rates, deadline=start + 60 * args.minutes, progress=True)
    recovered = perplexity(model, held_out)
    print(f"{done.steps} steps of {args.batch} x {WINDOW} tokens in {time.monotonic() - start:.0f} s\n")
    print(f"{'':28} {'perplexity':>10} {'ratio':>7} {'nats':>8}")
    for name, value in (("dense", dense), (f"2:4 NVFP4, {args.pruning}", pruned), ("2:4 NVFP4, recovered", recovered)):
        print(f"{name:28} {value:10.3f} {value / dense:7.3f} {math.log(value / dense):+8.4f}")
    if args.save:
        fp4_inductor.save(model, args.save)
        print(f"saved to {args.save}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="austen_dense", help="austen_dense, smollm2, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    parser.add_argument("--pruning", default="sparsegpt", choices=("wanda", "sparsegpt", "admm"))
    parser.add_argument("--text", help="a text file to evaluate (its start) and to train on (the rest); default: the bundled novel")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes of training; the schedule knows")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=0.015, help="step size, in units of a typical weight")
    parser.add_argument("--calibration", type=int, default=64, help="windows to calibrate the pruning on")
    parser.add_argument("--windows", type=int, default=32, help="windows to evaluate")
    parser.add_argument("--save", help="folder for the recovered model (fp4_inductor.save)")
    parser.add_argument("--progress", action="store_true", help="show progress bars and the report")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sys.exit(main(arguments()))
