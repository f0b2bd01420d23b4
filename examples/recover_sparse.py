"""Prune a language model to 2:4-sparse NVFP4, then train what is left to speak like the dense model again.

    python examples/recover_sparse.py                                a 2 M parameter model that ships with the repository, minutes on a CPU
    python examples/recover_sparse.py --model smollm2 --device cuda  SmolLM2-135M-Instruct
    python examples/recover_sparse.py --model PATH_OR_HUB_ID --text FILE --steps 2000 --save FOLDER

Distillation: the loss is the divergence of the sparse model's next-token distribution from the dense model's, on text that is
not evaluated. The pattern stays; the kept values and the block scales move, rounded to E2M1 and E4M3 in every forward pass, with
the gradient passed straight through the rounding. What is measured, and saved, is the packed FP4 model.
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
from torch import Tensor, nn

import fp4_inductor
from fp4_inductor import Sparse24Config, Sparse24Linear
from fp4_inductor.formats import e2m1, nvfp4, sparse24

WINDOW = 512


class FakeFP4(torch.autograd.Function):
    """``round(w / scale) * scale`` on the E2M1 grid where ``mask``; its gradient as if there were no rounding (but saturation)."""

    @staticmethod
    def forward(ctx, w: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        s = scale.unsqueeze(-1)
        ratio = w.unflatten(-1, (-1, nvfp4.GROUP)) / s
        grid = e2m1.round_to_grid(ratio)
        inside = (ratio.abs() <= e2m1.MAX) & mask.unflatten(-1, (-1, nvfp4.GROUP))
        # d/ds of round(w/s)*s is round(w/s) - w/s, and +-6 where it saturates.
        ctx.save_for_backward(inside, (grid - ratio * inside).mul_(mask.unflatten(-1, (-1, nvfp4.GROUP))).to(torch.bfloat16))
        return (grid * s).flatten(-2) * mask

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        inside, slope = ctx.saved_tensors
        blocks = grad.unflatten(-1, (-1, nvfp4.GROUP))
        return (blocks * inside).flatten(-2), (blocks * slope).sum(-1), None


class Trainable(nn.Module):
    """A Sparse24Linear whose kept values and block scales are float32 parameters."""

    def __init__(self, layer: Sparse24Linear):
        super().__init__()
        self.layer, self.pad = layer, layer.padding
        mask = sparse24.mask_of(layer.meta)
        scale = layer.scale.float().clamp_min(2.0**-9)
        codes = F.pad(layer.dequantize(torch.float32) / layer.global_scale, (0, self.pad)).unflatten(-1, (-1, nvfp4.GROUP)) / scale.unsqueeze(-1)
        codes = e2m1.round_to_grid(codes)  # the divisions left them a bit beside it
        # A latent value in the middle of its rounding cell would have to travel half a cell before anything changed. Spread over
        # their cells, some are about to flip in every step, and the first forward pass is still that of the packed model.
        size = codes.abs()
        up, down = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0)), torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
        at = torch.rand_like(codes) * 1.9 - 0.95
        codes = codes + codes.sign() * torch.where(at > 0, at * up, at * down) + (size == 0) * 0.25 * at
        # In units of the global scale, which stays.
        self.values = nn.Parameter((codes * scale.unsqueeze(-1)).flatten(-2) * mask)
        self.log_scale = nn.Parameter(scale.log2())
        self.register_buffer("mask", mask, persistent=False)

    def scale(self) -> Tensor:
        """The block scales, rounded to E4M3, with a straight-through gradient."""
        exact = self.log_scale.exp2().clamp(2.0**-9, nvfp4.SCALE_MAX)
        return exact + (exact.to(nvfp4.SCALE_DTYPE).float() - exact).detach()

    def forward(self, x: Tensor) -> Tensor:
        w = FakeFP4.apply(self.values, self.scale(), self.mask) * self.layer.global_scale
        return F.linear(x, w[:, : self.layer.in_features].to(x.dtype), self.layer.bias)

    @torch.no_grad()
    def pack(self) -> Sparse24Linear:
        """The layer, with what was learned in its buffers."""
        scale = self.scale()
        codes = e2m1.encode((self.values.unflatten(-1, (-1, nvfp4.GROUP)) / scale.unsqueeze(-1)).flatten(-2))
        values, meta = sparse24.compress(e2m1.pack(codes), self.mask)
        self.layer.take((values, meta, scale.to(nvfp4.SCALE_DTYPE), self.layer.global_scale))
        return self.layer


def windows(tokenizer, text: str) -> Tensor:
    """``[count, 513]`` token ids."""
    ids = torch.tensor(tokenizer.encode(text))
    return ids[: (len(ids) - 1) // WINDOW * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW)


@torch.no_grad()
def perplexity(model, rows: Tensor) -> float:
    """Per token."""
    nats = sum(F.cross_entropy(model(input_ids=r[None, :-1].to(model.device), use_cache=False).logits[0].float(), r[1:].to(model.device)).item() for r in rows)
    return math.exp(nats / len(rows))


def swap(model: nn.Module, old: type, new) -> nn.Module:
    """``new(module)`` in place of every module of type ``old``."""
    for name, module in list(model.named_modules()):
        if isinstance(module, old):
            model.set_submodule(name, new(module))
    return model


def recover(student: nn.Module, teacher: nn.Module, rows: Tensor, steps: int, batch: int, lr: float, deadline: float, seed: int = 0) -> int:
    """Distil ``teacher`` into the sparse layers of ``student``, in place; returns the steps done before ``deadline`` (time.monotonic)."""
    device = next(teacher.parameters()).device
    for p in student.parameters():
        p.requires_grad_(False)
    swap(student, Sparse24Linear, Trainable)
    trained = [m for m in student.modules() if isinstance(m, Trainable)]
    groups = [
        {"params": [m.values for m in trained], "rate": lr},
        {"params": [m.log_scale for m in trained], "rate": lr},
    ]
    # A step is relative to the size of what it moves: values lie in a grid whose typical entry is a few block scales.
    for m in trained:
        m.values.unit = float(m.values.detach().square().sum() / m.mask.sum()) ** 0.5  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam([{"params": [p], "rate": g["rate"] * getattr(p, "unit", 1.0)} for g in groups for p in g["params"]], betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(-(-steps * batch // len(rows)))])
    low_precision = torch.autocast(device.type, torch.bfloat16, enabled=next(teacher.parameters()).dtype == torch.bfloat16)
    start, pace = time.monotonic(), 0.0
    done, told = 0, 0.0
    for step in range(steps):
        # If time is what ends it, the learning rate must reach zero by then all the same.
        now = time.monotonic()
        fraction = max(step / steps, (now - start) / max(deadline - start, 1e-9))
        if now + pace > deadline:
            break
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, max((step + 1) / 10, fraction / 0.1)) * 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))
        x = rows[order[step * batch : (step + 1) * batch], :-1].to(device)
        with torch.no_grad(), low_precision:
            wanted = teacher(input_ids=x, use_cache=False).logits.float().log_softmax(-1)
        with low_precision:
            got = student(input_ids=x, use_cache=False).logits
        loss = F.kl_div(got.float().log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, pace = step + 1, (time.monotonic() - start) / (step + 1)
        if fraction >= told or step + 1 == steps:
            told = fraction + 0.05
            print(f"  step {done:5d}   KL {loss.item():.4f} nats a token   {time.monotonic() - start:6.0f} s", flush=True)
    swap(student, Trainable, Trainable.pack)
    return done


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
    done = recover(model, teacher, rest, args.steps, args.batch, args.lr, start + 60 * args.minutes)
    recovered = perplexity(model, held_out)
    print(f"{done} steps of {args.batch} x {WINDOW} tokens in {time.monotonic() - start:.0f} s\n")
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
