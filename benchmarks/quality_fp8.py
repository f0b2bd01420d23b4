"""What the FP8 path of prompts costs on top of NVFP4 weights, and which part of its rounding costs it: weights, activations, which layers.

    python benchmarks/quality_fp8.py --model smollm2   # or a folder, a hub id, austen_dense ...

The path is computed as the contracts of its kernels say (``fp4.dequantize_fp8``, ``fp4.quantize_rows_fp8``; kernels are bit-equal to both), products in
float32, on any device. ``kl`` is the divergence from the dense model; ``extra`` what it is above that of the same weights without FP8; ``from_weights`` the
divergence from the same weights without FP8. Texts and windows are those of ``quality.py``. Rows go to ``benchmarks/results/quality_fp8_<name>.csv``, each
replacing the last of its kind, as soon as they are there.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows
from torch import Tensor, nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config
from fp4_inductor.models import self_calibration
from fp4_inductor.ops import dequantize_fp8, quantize_rows_fp8

COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "weights", "path", "in_fp8", "ppl", "kl", "extra", "from_weights", "ratio")
WEIGHTS = {"gptq": NVFP4Config("gptq"), "activation": NVFP4Config("activation", calibration="self")}
_MEAN_SEQUENCES, _MEAN_TOKENS = 16, 256  # of the model's own text, over which channels' means are taken


@dataclass(frozen=True)
class Rounding:
    """What is rounded to E4M3.

    Args:
        weights: the codes times their block scales.
        channels: of one token that share a scale; 0: all of them; None: activations stay in bfloat16.
        terms: E4M3 numbers whose sum an activation becomes.
        centred: each channel's mean is taken out before, and its product, which is a constant, is added behind.
        kept: parts of names of layers that stay out of it.
    """

    weights: bool = True
    channels: int | None = 0
    terms: int = 1
    centred: bool = False
    kept: tuple[str, ...] = ()

    def activations(self, x: Tensor) -> Tensor:
        """float32 ``[M, K]``, of ``x [M, K]``."""
        left = x.float()
        if self.channels is None:
            return left
        total = torch.zeros_like(left)
        for _ in range(self.terms):
            rounded = round_activations(left, self.channels)
            total, left = total + rounded, left - rounded
        return total


def round_activations(x: Tensor, channels: int) -> Tensor:
    """``x [M, K]`` as ``fp4.quantize_rows_fp8`` rounds it, float32; each ``channels`` of a token (0: all) as a row of their own."""
    k = x.shape[1]
    rows = F.pad(x, (0, -k % channels)).reshape(-1, channels) if channels else x
    x8, scale = quantize_rows_fp8.reference(rows)
    return (x8.float() * scale).reshape(x.shape[0], -1)[:, :k]


class Path8(nn.Module):
    """An :class:`FP4Linear` whose products are those of :attr:`rounding`, which all of them share."""

    rounding: Rounding | None = None

    def __init__(self, name: str, layer: FP4Linear):
        super().__init__()
        self.name, self.layer, self.seen = f"{name}.", layer, []
        self.exact = layer.dequantize(torch.float32)
        rounded = dequantize_fp8.reference(layer.qdata, layer.scale).float() * (layer.global_scale / dequantize_fp8.WEIGHT_FACTOR)
        self.rounded = rounded[:, : layer.in_features]
        self.mean = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        how, rows, bias = Path8.rounding, x.reshape(-1, x.shape[-1]), self.layer.bias
        bias = None if bias is None else bias.float()
        if how is None:  # one pass over calibration text
            self.seen.append(rows.float().mean(0))
        if how is None or any(part in self.name for part in how.kept):
            y = F.linear(rows.float(), self.exact, bias)
        else:
            w = self.rounded if how.weights else self.exact
            if how.centred:
                y = F.linear(how.activations(rows.float() - self.mean), w) + F.linear(self.mean, self.exact, bias)
            else:
                y = F.linear(how.activations(rows), w, bias)
        return y.view(*x.shape[:-1], -1).to(x.dtype)


BF16 = Rounding(weights=False, channels=None)


def paths(blocks: list[str]) -> dict[str, Rounding]:
    """``blocks``: parts of the names of each decoder block's layers."""
    kinds = {"o_proj": ("o_proj.",), "down_proj": ("down_proj.",), "down_proj and o_proj": ("down_proj.", "o_proj."), "the MLP": ("mlp.",)}
    kinds |= {"attention": ("self_attn.",), "the last block": tuple(blocks[-1:]), "the last two blocks": tuple(blocks[-2:])}
    kinds["the last down_proj"] = tuple(f"{block}mlp.down_proj." for block in blocks[-1:])
    return {
        "bf16": BF16,
        "weights": Rounding(channels=None),
        "activations": Rounding(weights=False),
        "fp8": Rounding(),
        **{f"activations, a scale for {n} channels": Rounding(weights=False, channels=n) for n in (128, 32)},
        **{f"fp8, a scale for {n} channels": Rounding(channels=n) for n in (128, 32)},
        **{f"fp8, {name} in bf16": Rounding(kept=parts) for name, parts in kinds.items()},
        "fp8, activations in two terms": Rounding(terms=2),
        "fp8, means of channels apart": Rounding(centred=True),
        "fp8, a scale for 128 channels, the last block in bf16": Rounding(channels=128, kept=tuple(blocks[-1:])),
        "activations in two terms": Rounding(weights=False, terms=2),  # how far bfloat16 outside the layers carries the smallest of changes
    }


def take_means(model: nn.Module) -> None:
    """Over text that the model writes."""
    ids: Tensor = self_calibration.write(model, _MEAN_SEQUENCES, _MEAN_TOKENS)[0]["input_ids"]  # type: ignore[assignment]
    layers = [m for m in model.modules() if isinstance(m, Path8)]
    for m in layers:
        m.seen.clear()  # writing runs the layers too
    Path8.rounding = None
    with torch.no_grad():
        for row in ids:
            model(input_ids=row[None], use_cache=False)
    for m in layers:
        m.mean = torch.stack(m.seen).mean(0)
        m.seen.clear()


def run(name: str, label: str, device: str, count: int, wanted: Callable[[str], bool], write: bool) -> None:
    model, tokenizer = load_model(name, device)
    batches = {k: windows(tokenizer, t, 0, count) for k, t in texts().items()}
    dense = {k: log_probabilities(model, b) for k, b in batches.items()}
    base = {k: perplexity(dense[k], batches[k]) for k in batches}
    for weights, config in WEIGHTS.items():
        if not any(wanted(f"{weights}: {path}") for path in paths([""])):
            continue
        quantized = copy.deepcopy(model)
        fp4_inductor.quantize_model(quantized, config, progress=False, strict=False)
        layers = {n: m for n, m in quantized.named_modules() if isinstance(m, FP4Linear)}
        rounded = [Path8(n, layer) for n, layer in layers.items()]
        for n, layer in zip(layers, rounded, strict=True):
            quantized.set_submodule(n, layer)
        total = sum(m.exact.numel() for m in rounded)
        Path8.rounding = BF16
        take_means(quantized)
        Path8.rounding = BF16
        exact = {k: log_probabilities(quantized, b) for k, b in batches.items()}
        of_weights = {k: divergence(exact[k], dense[k]) for k in batches}
        blocks = list(dict.fromkeys(".".join(part) + "." for n in layers for part in [n.split(".")[:3]] if len(part) == 3 and part[2].isdecimal()))
        for path, rounding in paths(blocks).items():
            if path != "bf16" and not wanted(f"{weights}: {path}"):
                continue
            start = time.perf_counter()
            Path8.rounding = rounding
            out = sum(m.exact.numel() for m in rounded if any(part in m.name for part in rounding.kept))
            rows = []
            for text, batch in batches.items():
                log_p = exact[text] if rounding == BF16 else log_probabilities(quantized, batch)
                ppl, kl = perplexity(log_p, batch), divergence(log_p, dense[text])
                rows.append({
                    "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label,
                    "text": text, "tokens": count * WINDOW, "weights": weights, "path": path, "in_fp8": 0.0 if rounding == BF16 else 1 - out / total,
                    "ppl": ppl, "kl": kl, "extra": kl - of_weights[text], "from_weights": divergence(log_p, exact[text]),
                    "ratio": ppl / base[text],
                })  # fmt: skip
                print(f"{weights:10s} {path:38s} {line(rows[-1])}  {time.perf_counter() - start:.0f} s", flush=True)
            if write:
                save(rows, "quality_fp8", COLUMNS, lambda row: tuple(str(row[c]) for c in ("text", "tokens", "weights", "path")))


def line(row: dict) -> str:
    return f"{row['text']:18s} kl {row['kl']:.4f}  extra {row['extra']:+.4f}  from the same weights {row['from_weights']:.4f}  ppl {row['ppl']:.3f}"


def main() -> None:
    parser = options(str(__doc__), 12)
    parser.add_argument("--only", nargs="+", default=[""], help='only the rows whose name holds one of these texts, e.g. "gptq: fp8"')
    args = parser.parse_args()
    run(args.model, args.name or Path(args.model).name, args.device, args.windows, lambda name: any(w in name for w in args.only), not args.no_write)


if __name__ == "__main__":
    main()
