"""What quantization costs: perplexity and KL of a model with NVFP4 weights against the same model in bfloat16.

    python benchmarks/quality.py --model smollm2   # or a folder, a hub id, austen_dense ...

Texts that need no network: the bundled part of Northanger Abbey, and the language reference that comes with Python
(``pydoc_data``). Each is cut into windows of 512 tokens; the first ones are evaluated, and ``activation`` is calibrated
on 16 windows that are not. Rows go to ``benchmarks/results/quality_<name>.csv``, each replacing the last of its kind.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import datetime
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import transformers  # noqa: E402
from _shared import held_out_text, load_model  # noqa: E402

import fp4_inductor  # noqa: E402
from fp4_inductor import NVFP4Config  # noqa: E402

WINDOW = 512
CALIBRATION_WINDOWS = 16
COLUMNS = ("date", "torch", "transformers", "model", "text", "tokens", "weights", "calibration", "ppl", "kl", "ratio")


def texts() -> dict[str, str]:
    """name -> text; evaluation from the start, calibration from the middle on."""
    from pydoc_data.topics import topics

    return {"northanger_abbey": held_out_text(), "python_reference": "\n\n".join(topics[k] for k in sorted(topics))}


def windows(tokenizer, text: str, start: int, count: int) -> Tensor:
    """``[count, 513]`` token ids of ``text`` from character ``start`` on: 512 inputs and their successors."""
    ids = tokenizer.encode(text[start : start + count * WINDOW * 8])
    if len(ids) < count * WINDOW + 1:
        raise SystemExit(f"the text has {len(ids)} tokens from character {start} on; {count * WINDOW + 1} are needed")
    return torch.stack([torch.tensor(ids[i * WINDOW : (i + 1) * WINDOW + 1]) for i in range(count)])


@torch.no_grad()
def log_probabilities(model, batch: Tensor) -> list[Tensor]:
    """Log probabilities ``[512, vocabulary]`` float32 of each window, on the CPU."""
    rows = batch[:, :-1].to(model.device)
    return [model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1).cpu() for row in rows]


def perplexity(log_p: list[Tensor], batch: Tensor) -> float:
    return math.exp(sum(F.nll_loss(p, w[1:]).item() for p, w in zip(log_p, batch, strict=True)) / len(log_p))


def divergence(log_p: list[Tensor], reference: list[Tensor]) -> float:
    """KL(reference || model) in nats per token."""
    return sum(F.kl_div(p, r, log_target=True, reduction="batchmean").item() for p, r in zip(log_p, reference, strict=True)) / len(log_p)


def configurations(calibration: dict[str, Tensor]) -> list[tuple[str, str, NVFP4Config]]:
    """(weights, calibration text, config)"""
    plain = [(search, "", NVFP4Config(search)) for search in ("amax", "four_over_six", "mse")]
    plain += [(f"four_over_six, {head} head", "", NVFP4Config("four_over_six", lm_head=head)) for head in ("fp8", "nvfp4")]
    plain.append(("amax, w4a4", "", NVFP4Config("amax", prefill="nvfp4")))
    plain += [
        (name, "itself", NVFP4Config("activation", calibration="self", prefill=path)) for name, path in (("activation", "auto"), ("activation, w4a4", "nvfp4"))
    ]
    plain += [(name, "itself", NVFP4Config(name)) for name in ("auto", "gptq")]
    given = {name: list(batch[:, :-1].split(4)) for name, batch in calibration.items()}
    # "gptq" adds text of its own to what it is given.
    return plain + [
        (weights, f"{name} and itself" if weights == "gptq" else name, NVFP4Config(weights, calibration=batches))
        for weights in ("activation", "gptq")
        for name, batches in given.items()
    ]


def run(name: str, label: str, device: str, count: int, only: Sequence[str] = ("",)) -> list[dict]:
    model, tokenizer = load_model(name, device)
    bodies = texts()
    batches = {k: windows(tokenizer, t, 0, count) for k, t in bodies.items()}
    calibration = {k: windows(tokenizer, t, len(t) // 2, CALIBRATION_WINDOWS) for k, t in bodies.items()}
    common = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": label,
        "tokens": count * WINDOW,
    }
    reference = {k: log_probabilities(model, b) for k, b in batches.items()}
    base = {k: perplexity(reference[k], batches[k]) for k in batches}
    rows = [common | {"text": k, "weights": "bf16", "calibration": "", "ppl": base[k], "kl": 0.0, "ratio": 1.0} for k in batches]
    for weights, calibrated_on, config in configurations({k: b.to(device) for k, b in calibration.items()}):
        if not any(text in f"{weights} ({calibrated_on})" for text in only):
            continue
        quantized = copy.deepcopy(model)
        start = time.perf_counter()
        fp4_inductor.quantize_model(quantized, config, progress=False, strict=False)
        seconds = time.perf_counter() - start
        for text, batch in batches.items():
            log_p = log_probabilities(quantized, batch)
            ppl = perplexity(log_p, batch)
            figures = {"ppl": ppl, "kl": divergence(log_p, reference[text]), "ratio": ppl / base[text]}
            rows.append(common | {"text": text, "weights": weights, "calibration": calibrated_on} | figures)
            print(f"{_line(rows[-1])}  quantized in {seconds:.1f} s", flush=True)
    return rows


def _kind(row: dict) -> tuple:
    return row["text"], row["tokens"], row["weights"], row["calibration"]


def _line(row: dict) -> str:
    name = row["weights"] + (f" ({row['calibration']})" if row["calibration"] else "")
    return f"{row['text']:18s} {name:32s} ppl {row['ppl']:8.3f}  kl {row['kl']:.4f}  ratio {row['ratio']:.4f}"


def save(rows: list[dict], name: str, columns: tuple[str, ...], kind: Callable[[dict], tuple]) -> None:
    """Write ``rows`` to ``results/<name>_<model>.csv``, in the place of those of the same ``kind`` that it has."""
    path = HERE / "results" / f"{name}_{rows[0]['model'].lower().replace('-', '_')}.csv"
    path.parent.mkdir(exist_ok=True)
    written = [{k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in row.items() if k in columns} for row in rows]
    with open(path, newline="") if path.exists() else contextlib.nullcontext([]) as file:
        kept = {kind(row): row for row in csv.DictReader(file)}
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows((kept | {kind(row): row for row in written}).values())
    print(f"wrote {path.relative_to(HERE.parent)}")


def options(description: str, windows: int) -> argparse.ArgumentParser:
    """What every benchmark of quality takes; ``windows``: how many by default."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, austen_dense, a folder, or a hub id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--windows", type=int, default=windows, help="windows of 512 tokens to evaluate per text")
    parser.add_argument("--name", help="of the model in the table and the file; default: the end of --model")
    parser.add_argument("--no-write", action="store_true", help="print only")
    return parser


def main() -> None:
    parser = options(str(__doc__), 5)
    parser.add_argument("--only", nargs="+", default=[""], help='only the rows whose name holds one of these texts, e.g. head "gptq (itself)"')
    args = parser.parse_args()
    rows = run(args.model, args.name or args.model.rstrip("/").rsplit("/", 1)[-1], args.device, args.windows, args.only)
    for row in rows[:2]:
        print(_line(row))
    if not args.no_write:
        save(rows, "quality", COLUMNS, _kind)


if __name__ == "__main__":
    main()
