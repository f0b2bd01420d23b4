"""Bits against loss: the layers with the largest predicted share of the KL stay in FP8 or bfloat16, the others are NVFP4 by ``scale_search="gptq"``.

    python benchmarks/quality_bits.py --model smollm2   # or a folder, a hub id, austen_dense ...

Shares are those of the report (``predicted_kl``), which come from text of the model's own. Layers go by what a bit of theirs saves: predicted KL divided by
weights. The others keep the codes that they have. Texts and windows are those of ``quality.py``. Rows go to ``benchmarks/results/quality_bits_<name>.csv``,
each replacing the last of its kind, and ``plots.py`` draws them.
"""

from __future__ import annotations

import copy
import datetime
from pathlib import Path

import torch
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows
from torch import nn

import fp4_inductor
from fp4_inductor import FP8Linear, NVFP4Config

COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "kept_in", "kept_layers", "bits", "ppl", "kl", "ratio")
NVFP4, WIDE = 4.5, {"fp8": 8.0, "bf16": 16.0}
TARGETS = (4.5, 4.6, 4.75, 5.0, 5.5, 6.0, 7.0, 8.0, 10.0, 12.0)


def kept(shares: dict[str, float], weights: dict[str, int], wide: float, bits: float) -> list[str]:
    """The layers, those first of which a bit saves most, that make a mean of at most ``bits`` a weight in ``wide`` bits each."""
    room, found = (bits - NVFP4) / (wide - NVFP4) * sum(weights.values()), []
    for name in sorted(shares, key=lambda n: -shares[n] / weights[n]):
        if weights[name] <= room:
            found.append(name)
            room -= weights[name]
    return found


def wide_layer(dense: nn.Linear, how: str) -> nn.Module:
    # prefill="bf16": activations are not rounded, so that the weights alone are compared.
    return FP8Linear.from_weight(dense.weight, dense.bias, prefill="bf16") if how == "fp8" else dense


def run(name: str, label: str, device: str, count: int, write: bool, checkpoint_dir: str | None) -> None:
    model, tokenizer = load_model(name, device)
    batches = {k: windows(tokenizer, t, 0, count) for k, t in texts().items()}
    reference = {k: log_probabilities(model, b) for k, b in batches.items()}
    base = {k: perplexity(reference[k], batches[k]) for k in batches}
    quantized = copy.deepcopy(model)
    fp4_inductor.quantize_model(quantized, NVFP4Config("gptq"), progress=False, strict=False, checkpoint_dir=checkpoint_dir)
    report = fp4_inductor.report(quantized)
    shares = {row.name: row.predicted_kl for row in report.layers if row.predicted_kl is not None}
    weights = {row.name: row.params for row in report.layers}
    narrow = {layer: quantized.get_submodule(layer) for layer in shares}
    done: set[tuple[str, int]] = set()
    for how, wide in WIDE.items():
        for target in TARGETS:
            chosen = kept(shares, weights, wide, target)
            if target > wide or (how, len(chosen)) in done:
                continue
            done.add((how, len(chosen)))
            for layer in shares:
                quantized.set_submodule(layer, wide_layer(model.get_submodule(layer), how) if layer in chosen else narrow[layer])
            bits = NVFP4 + (wide - NVFP4) * sum(weights[layer] for layer in chosen) / sum(weights.values())
            rows = []
            for text, batch in batches.items():
                log_p = log_probabilities(quantized, batch)
                ppl = perplexity(log_p, batch)
                rows.append({
                    "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label,
                    "text": text, "tokens": count * WINDOW, "kept_in": how, "kept_layers": len(chosen), "bits": bits, "ppl": ppl,
                    "kl": divergence(log_p, reference[text]), "ratio": ppl / base[text],
                })  # fmt: skip
                print(f"{text:18s} {len(chosen):4d} layers in {how:5s} {bits:6.3f} bits  kl {rows[-1]['kl']:.4f}  ratio {rows[-1]['ratio']:.4f}", flush=True)
            if write:
                save(rows, "quality_bits", COLUMNS, lambda row: tuple(str(row[c]) for c in ("text", "tokens", "kept_in", "kept_layers")))


def main() -> None:
    parser = options(str(__doc__), 4)
    parser.add_argument("--checkpoint-dir", help="a folder in which quantize_model keeps finished layers, to go on after an interruption")
    args = parser.parse_args()
    run(args.model, args.name or Path(args.model).name, args.device, args.windows, not args.no_write, args.checkpoint_dir)


if __name__ == "__main__":
    main()
