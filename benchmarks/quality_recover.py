"""What ``fp4_inductor.recover`` brings back: KL and perplexity of a dense NVFP4 model before and after, on texts that it was not trained on.

    python benchmarks/quality_recover.py --model smollm2 --windows 4 --minutes 15   # or a folder, a hub id, austen_dense ...

Texts and windows are those of ``quality.py``. The text to train on is what the model writes itself. Rows go to
``benchmarks/results/quality_recover_<name>.csv``, each replacing the last of its kind.
"""

from __future__ import annotations

import copy
import datetime
from pathlib import Path

import torch
import transformers
from quality import WINDOW, divergence, load_model, log_probabilities, options, perplexity, save, texts, windows

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.models.distil import Rates
from fp4_inductor.models.recover import DENSE

COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "weights", "steps", "trained_tokens", "seconds", "ppl", "kl", "ratio")


def main() -> None:
    parser = options(str(__doc__), 4)
    parser.add_argument("--scale-search", default="gptq", help="of the weights to start from (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training at most")
    parser.add_argument("--steps", type=int, help="of training at most (default: as many as there is time for)")
    parser.add_argument("--batch", type=int, help="rows of 256 tokens in a step (default: recover's)")
    parser.add_argument("--rates", type=float, default=1.0, metavar="FACTOR", help="of recover's rates")
    parser.add_argument("--own-text", type=int, default=0, help="tokens that the model writes (default: recover's)")
    args = parser.parse_args()
    source, tokenizer = load_model(args.model, args.device)
    batches = {k: windows(tokenizer, t, 0, args.windows) for k, t in texts().items()}
    reference = {k: log_probabilities(source, b) for k, b in batches.items()}
    config = NVFP4Config(args.scale_search, calibration="self" if args.scale_search == "activation" else None, prefill="bf16")
    model = fp4_inductor.quantize_model(copy.deepcopy(source), config, progress=False, strict=False)
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ") if args.device == "cuda" else ""
    label = args.name or Path(args.model).name
    common = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__, "model": label}

    def rows(weights: str, steps: int, tokens: int, seconds: float) -> list[dict]:
        found = []
        for k, batch in batches.items():
            log_p = log_probabilities(model, batch)
            ppl, kl = perplexity(log_p, batch), divergence(log_p, reference[k])
            figures = {"ppl": ppl, "kl": kl, "ratio": ppl / perplexity(reference[k], batch)}
            found.append(common | {"text": k, "tokens": args.windows * WINDOW, "weights": weights, "steps": steps, "trained_tokens": tokens} | figures)
            found[-1]["seconds"] = round(seconds)
            print(f"{k:18s} {weights:24s} ppl {ppl:8.3f}  kl {kl:.4f}  ratio {figures['ratio']:.4f}  {steps} steps, {seconds:.0f} s", flush=True)
        return found

    written = rows(f"{args.scale_search}{gpu and f' ({gpu})'}", 0, 0, 0.0)
    rates = Rates(*(args.rates * r for r in (DENSE.values, DENSE.scales, DENSE.rest)))
    done = fp4_inductor.recover(model, source, own_text=args.own_text or True, steps=args.steps, minutes=args.minutes, batch=args.batch, rates=rates)
    written += rows(f"{args.scale_search}, recovered{gpu and f' ({gpu})'}", done.steps, done.tokens, done.seconds)
    if not args.no_write:
        save(written, "quality_recover", COLUMNS, lambda row: tuple(str(row[c]) for c in ("text", "tokens", "weights")))


if __name__ == "__main__":
    main()
