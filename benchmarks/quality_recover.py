"""What ``fp4_inductor.recover`` brings back: KL and perplexity of a dense NVFP4 model before and after, on texts that it was not trained on.

    python benchmarks/quality_recover.py --model smollm2 --windows 4 --minutes 15   # or a folder, a hub id, austen_dense ...

Texts and windows are those of ``quality.py``. The text to train on is what the model writes itself. Rows go to
``benchmarks/results/quality_recover_<name>.csv``, each replacing the last of its kind.
"""

from __future__ import annotations

import copy
import datetime
import time
from pathlib import Path

import torch
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.models import recover
from fp4_inductor.models.distil import Rates

COLUMNS = (
    "date", "torch", "transformers", "model", "text", "tokens", "weights", "rate", "own_tokens", "batch", "steps", "trained_tokens", "seconds", "ppl", "kl", "ratio",
)  # fmt: skip
KIND = ("text", "tokens", "weights", "rate", "own_tokens", "batch", "steps")


def main() -> None:
    parser = options(str(__doc__), 4)
    parser.add_argument("--scale-search", default="gptq", help="of the weights to start from (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="of a run at most, its text included")
    parser.add_argument("--steps", type=int, help="of training at most (default: as many as there is time for)")
    parser.add_argument("--batch", type=int, help="rows of 256 tokens in a step (default: recover's)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], metavar="FACTOR", help="of recover's rates: a run for each, on the same text")
    parser.add_argument("--own-text", type=int, default=0, help="tokens that the model writes (default: recover's)")
    args = parser.parse_args()
    source, tokenizer = load_model(args.model, args.device)
    batches = {k: windows(tokenizer, t, 0, args.windows) for k, t in texts().items()}
    reference = {k: log_probabilities(source, b) for k, b in batches.items()}
    config = NVFP4Config(args.scale_search, calibration="self" if args.scale_search == "activation" else None, prefill="bf16")
    start = fp4_inductor.quantize_model(copy.deepcopy(source), config, progress=False, strict=False)
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ") if args.device == "cuda" else ""
    label = args.name or Path(args.model).name
    common = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label}

    def rows(model: torch.nn.Module, weights: str, **run: object) -> list[dict]:
        found = []
        for k, batch in batches.items():
            log_p = log_probabilities(model, batch)
            ppl, kl = perplexity(log_p, batch), divergence(log_p, reference[k])
            figures = {"ppl": ppl, "kl": kl, "ratio": ppl / perplexity(reference[k], batch)}
            found.append(common | dict.fromkeys(KIND, "") | {"text": k, "tokens": args.windows * WINDOW, "weights": weights} | run | figures)
            print(f"{k:18s} {weights:24s} ppl {ppl:8.3f}  kl {kl:.4f}  ratio {figures['ratio']:.4f}  {run}", flush=True)
        return found

    def save_rows(found: list[dict]) -> None:
        if not args.no_write:  # behind each run: what stops a later one takes nothing back
            save(found, "quality_recover", COLUMNS, lambda row: tuple(f"{row[c]}" for c in KIND))

    on = f" ({gpu})" if gpu else ""
    save_rows(rows(start, f"{args.scale_search}{on}", steps=0, trained_tokens=0, seconds=0))
    begin = time.monotonic()
    until = begin + 60 * args.minutes * recover.WRITING
    written = recover.text_of(source, args.own_text or True, until, recover.wanted_rows(args.steps, args.batch))
    spent = time.monotonic() - begin
    print(f"{written.numel()} tokens of its own text in {spent:.0f} s")
    for factor in args.rates:
        model = copy.deepcopy(start)
        rates = Rates(*(factor * r for r in (recover.DENSE.values, recover.DENSE.scales, recover.DENSE.rest)))
        options_ = {"steps": args.steps, "batch": args.batch, "rates": rates}
        done = fp4_inductor.recover(model, source, written, own_text=False, minutes=args.minutes - spent / 60, **options_)
        run = {"rate": factor, "own_tokens": written.numel(), "batch": done.tokens // max(done.steps, 1) // written.shape[1], "steps": done.steps}
        save_rows(rows(model, f"{args.scale_search}, recovered{on}", **run, trained_tokens=done.tokens, seconds=round(spent + done.seconds)))


if __name__ == "__main__":
    main()
