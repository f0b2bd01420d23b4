"""What a cache in 8 or 4 bits costs: KL and perplexity of a model over a ``KVCache`` in each format, against the model without a cache.

    python benchmarks/quality_kv.py --model smollm2   # or a folder, a hub id, austen_dense ...

Texts and windows are those of ``quality.py``: 512 tokens, each window in one call over an empty cache. A query attends to what the cache stores, of its own
window and of itself too, so that one call measures what a step for each token would. The model computes in float32, so that nothing else is rounded.

``K + 60``: 60 is added to two slow channels of each head's keys, as the bias of Qwen 2.5 does. In exact arithmetic that changes nothing: it adds one number
to all scores of a query. Rows go to ``benchmarks/results/quality_kv_<name>.csv``, each replacing the last of its kind.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows
from torch import Tensor

import fp4_inductor
from fp4_inductor.decoding.cache import KVLayer
from fp4_inductor.formats import kv

BIAS = 60.0
COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "kv", "bits_a_pair", "bias", "ppl", "kl", "ratio")


@contextlib.contextmanager
def biased(model: torch.nn.Module, bias: float) -> Iterator[None]:
    """``bias`` is added to two slow channels of each head of K, other ones for each layer and head."""
    plain, number = KVLayer.update, iter(range(1 << 30))
    drawn: dict[int, Tensor] = {}

    def update(self: KVLayer, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        if id(self) not in drawn:
            heads, half = key_states.shape[1], key_states.shape[3] // 2
            which = torch.randint(half * 3 // 4, half, (heads, 2), generator=torch.Generator().manual_seed(next(number)))
            drawn[id(self)] = torch.zeros(heads, 1, 2 * half).scatter_(2, which[:, None], bias).to(key_states)
        return plain(self, key_states + drawn[id(self)], value_states, *args, **kwargs)

    KVLayer.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVLayer.update = plain  # type: ignore[method-assign]


@torch.no_grad()
def over_a_cache(model, batch: Tensor, name: str) -> list[Tensor]:
    """As :func:`quality.log_probabilities`, over a cache in the format ``name``."""
    cache = fp4_inductor.KVCache(model, WINDOW, kv=name)
    found = []
    for row in batch[:, :-1].to(model.device):
        found.append(F.log_softmax(model(input_ids=row[None], past_key_values=cache).logits[0].float(), -1).cpu())
        cache.reset()
    return found


def run(name: str, label: str, device: str, count: int) -> list[dict]:
    model, tokenizer = load_model(name, device)
    model = model.float()
    width = model.config.head_dim if getattr(model.config, "head_dim", None) else model.config.hidden_size // model.config.num_attention_heads
    rows = []
    for text, body in texts().items():
        batch = windows(tokenizer, body, 0, count)
        reference = log_probabilities(model, batch)
        base = perplexity(reference, batch)
        for format in kv.NAMES:
            for bias in (0.0, BIAS):
                start = time.perf_counter()
                with biased(model, bias) if bias else contextlib.nullcontext():
                    log_p = over_a_cache(model, batch, format)
                ppl = perplexity(log_p, batch)
                held = kv.named(format)
                rows.append({
                    "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label,
                    "text": text, "tokens": count * WINDOW, "kv": format, "bits_a_pair": 64.0 if held is None else held.bits(width), "bias": bias, "ppl": ppl,
                    "kl": divergence(log_p, reference), "ratio": ppl / base,
                })  # fmt: skip
                print(f"{line(rows[-1])}  {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def kind(row: dict) -> tuple:
    return tuple(str(row[column]) for column in ("text", "tokens", "kv", "bias"))


def line(row: dict) -> str:
    name = row["kv"] + (f", K + {row['bias']:.0f}" if row["bias"] else "")
    return f"{row['text']:18s} {name:16s} {row['bits_a_pair']:6.2f} bits a pair  ppl {row['ppl']:8.3f}  kl {row['kl']:.5f}  ratio {row['ratio']:.4f}"


def main() -> None:
    parser = options(str(__doc__), 5)
    args = parser.parse_args()
    rows = run(args.model, args.name or Path(args.model).name, args.device, args.windows)
    if not args.no_write:
        save(rows, "quality_kv", COLUMNS, kind)


if __name__ == "__main__":
    main()
