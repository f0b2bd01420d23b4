"""What each part of ``scale_search="gptq"`` is worth: KL and perplexity with that part left out, the text and all else the same.

    python benchmarks/quality_gptq.py --model smollm2 --windows 4   # or a folder, a hub id, austen_dense ...

Texts and windows are those of ``quality.py``. The model writes its text, and each token gets its weight, once for all. Rows go to
``benchmarks/results/quality_gptq_<name>.csv``, each replacing the last of its kind, as soon as they are there.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows
from torch import Tensor

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.formats import gptq as numbers
from fp4_inductor.models import gptq, output_moments
from fp4_inductor.models.token_weights import TokenWeights

PREFILL = "bf16"  # what weights cost, without what a GPU's FP8 products of prompts add
COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "weights", "own_tokens", "ppl", "kl", "ratio")


class Alike(TokenWeights):
    """Every token weighs the same; experts go by the norm of their inputs."""

    def __call__(self, name: str, batch: int, inputs: list[Tensor]) -> list[Tensor]:
        return [x.new_ones(x.shape[:-1].numel(), dtype=torch.float32) for x in inputs]


def as_they_lie(h: Tensor) -> tuple[Tensor, Tensor]:
    k = h.shape[0]
    return torch.arange(k, device=h.device), torch.arange(k // 16, device=h.device)


PARTS: dict[str, Callable[[], Any]] = {
    "all of it": contextlib.nullcontext,
    "tokens alike": lambda: patch.object(gptq, "fisher", lambda *args: Alike()),
    "tokens by the norm of their inputs": lambda: patch.object(gptq, "fisher", lambda *args: TokenWeights(reason="left out")),
    "no refinement": lambda: patch.object(numbers, "SWEEPS", 0),
    "damping 0.01 of the mean": lambda: patch.multiple(numbers, DAMPING=0.01, DAMPING_OWN=0.0),
    "rows by themselves": lambda: patch.object(output_moments, "MOST", 0),
    "columns as they lie": lambda: patch.object(numbers, "block_order", as_they_lie),
}


def run(name: str, label: str, device: str, count: int, only: list[str], write: bool) -> None:
    model, tokenizer = load_model(name, device)
    batches = {k: windows(tokenizer, t, 0, count) for k, t in texts().items()}
    reference = {k: log_probabilities(model, b) for k, b in batches.items()}
    base = {k: perplexity(reference[k], batches[k]) for k in batches}
    text = gptq.text(model, [])
    # Of each copy of the model: its layers have the same names, and get the same text.
    fisher = functools.cache(lambda: found(*arguments))
    found = gptq.fisher
    arguments: list[Any] = []

    def once(*args: Any) -> TokenWeights:
        arguments[:] = args
        all_of_it, wanted = fisher(), args[-1]
        return TokenWeights(all_of_it.found, all_of_it.reason, all_of_it.experts, {n: m for n, m in all_of_it.outputs.items() if n in wanted})

    for part, left_out in PARTS.items():
        if not any(wanted in part for wanted in only):
            continue
        quantized = copy.deepcopy(model)
        start = time.perf_counter()
        with patch.object(gptq, "text", lambda *args: text), patch.object(gptq, "fisher", once), left_out():
            fp4_inductor.quantize_model(quantized, NVFP4Config("gptq", prefill=PREFILL), progress=False, strict=False)
        seconds = time.perf_counter() - start
        rows = []
        for k, batch in batches.items():
            log_p = log_probabilities(quantized, batch)
            ppl = perplexity(log_p, batch)
            rows.append({
                "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label, "text": k,
                "tokens": count * WINDOW, "weights": part, "own_tokens": math.prod(gptq.form_of(model)[:2]), "ppl": ppl, "kl": divergence(log_p, reference[k]),
                "ratio": ppl / base[k],
            })  # fmt: skip
            print(f"{k:18s} {part:36s} ppl {ppl:8.3f}  kl {rows[-1]['kl']:.4f}  ratio {rows[-1]['ratio']:.4f}  {seconds:.0f} s", flush=True)
        if write:
            save(rows, "quality_gptq", COLUMNS, lambda row: tuple(str(row[c]) for c in ("text", "tokens", "weights")))


def main() -> None:
    parser = options(str(__doc__), 4)
    parser.add_argument("--only", nargs="+", default=[""], help="only the rows whose name holds one of these texts, e.g. alike")
    args = parser.parse_args()
    run(args.model, args.name or Path(args.model).name, args.device, args.windows, args.only, not args.no_write)


if __name__ == "__main__":
    main()
