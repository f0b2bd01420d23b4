"""``recover``: a quantized model trained to predict what its source predicts, by what costs nothing when it runs.

Codes (E2M1, straight through the rounding), block scales (E4M3), biases, norms and tables of tokens move; the format, the global scales and the pattern of 2:4
weights stay. The loss is the KL divergence of the next token's distribution from the source's (distillation), on text that the source writes
and text that is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ShapeError
from ..modules import FP4Linear, Sparse24Linear
from . import self_calibration
from .coverage import add_notes
from .distil import BATCH_GPU, SEED, Rates, distil, trainable_layers, unquantized
from .evaluate import evaluate
from .trainable import write_parts

SEQUENCES, TOKENS = 256, 256  # of the text that the source writes
_SEQUENCES_GPU = 262_144  # there it is quicker
_AT_ONCE = 2048  # sequences that a small source writes at once on a GPU
WRITING = 0.25  # of the time, at most
_HELD_OUT = 8  # one row in so many is measured on, and not trained on
_HELD_OUT_ROWS = 64  # at most

# austen_dense, 60 steps of 2,048 tokens of its own text, from "activation" with a KL of 0.0140 on a novel: 0.0106; with rates 0.6 times as high 0.0115.
DENSE = Rates(2e-3, 2e-3, 5e-4)
SPARSE = Rates(0.015, 0.015, 0.0)  # where half the weights are gone, there is far to go


@dataclass(frozen=True)
class Recovery:
    """What :func:`recover` did.

    Args:
        kl_before, kl_after: KL(source || model) in nats a token on rows that were not trained on.
        kept: whether the model has what was learned; False: the KL did not fall, and the model is as it was.
        steps, tokens: that were trained on.
        seconds: of everything.
        text: what it was trained on, in words.
        slow: why a step on a GPU was not replayed as one CUDA graph, or its rounding not one kernel; empty: nothing was in the way.
    """

    kl_before: float
    kl_after: float
    kept: bool
    steps: int
    tokens: int
    seconds: float
    text: str
    slow: str = ""

    def __str__(self) -> str:
        verdict = ("" if self.kept else "; no gain: the model is as it was") + (f"; slowly: {self.slow}" if self.slow else "")
        return (
            f"recovered by {self.steps} steps ({self.tokens} tokens) on {self.text} in {self.seconds:.0f} s: "
            f"KL from the source on held-out rows {self.kl_before:.4f} -> {self.kl_after:.4f} nats a token{verdict}"
        )


def recover(
    model: nn.Module,
    source: nn.Module,
    text: Tensor | None = None,
    *,
    own_text: bool | int = True,
    steps: int | None = None,
    minutes: float = 15.0,
    batch: int | None = None,
    rates: Rates | None = None,
    progress: bool = True,
) -> Recovery:
    """Train a quantized language model to predict what its source predicts. In place, and only if that lowers the KL on held-out text.

    Trained are the codes and block scales of quantized linear layers, dense and 2:4-sparse (whose pattern stays), their biases, norms, and beside less
    than a billion such weights the tables of tokens, input and output, where they are not quantized: what costs nothing at run time. Experts, quantized
    heads and layers that share one weight stay as they are. Training takes 16 bytes of memory for each weight that is trained, besides both models.

    Args:
        model: quantized by :func:`fp4_inductor.quantize_model`, or loaded. After an error or Ctrl-C it is as it was.
        source: the dense model that it was made from, on the same device; not changed.
        text: int64 ``[rows, T]``: tokens to train on; None: only what ``source`` writes. Text like that which the model will see is best.
        own_text: how many tokens ``source`` writes; True: 65,536, on a GPU up to 67,108,864, in at most a quarter of ``minutes``; False: ``text`` alone.
        steps, minutes: whichever ends first; the schedule of the rate knows both. None: as many steps as there is time for.
        batch: rows of a step; None: 8, on a GPU 64, of a billion weights or more 32.
        rates: of Adam; None: those for dense, or for 2:4-sparse layers.
        progress: show a progress bar, and print the result.

    Returns:
        :class:`Recovery`; the model's report has it as a note.

    Raises:
        ConfigError: nothing to train; ShapeError: no such text; CalibrationError: ``source`` cannot write; NonFiniteError: the loss is not finite.
    """
    start = time.monotonic()
    endless = steps is None and minutes == math.inf
    if model is source or endless or (steps is not None and steps < 1) or (batch is not None and batch < 1) or not minutes > 0 or int(own_text) < 0:
        raise ConfigError(
            "recover takes a quantized model, its source, and time to train",
            value=f"model is source: {model is source}, steps={steps}, batch={batch}, minutes={minutes}, own_text={own_text}",
            limit="two models, steps >= 1, batch >= 1, minutes > 0, own_text >= 0, and an end: steps, or minutes that are finite",
            remedy="quantize_model works in place: deepcopy the model before, or load the source again.",
        )
    layers = trainable_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layer to train",
            value="no FP4Linear or Sparse24Linear with a weight of its own",
            limit="a model that quantize_model or load made, whose linear layers are quantized",
            remedy="Quantize it first. Experts are not trained.",
        )
    rows, described = _rows(source, text, own_text, start + 60 * minutes * WRITING, wanted_rows(steps, batch))
    held, rows = _held_out(rows)
    before = _kl(model, source, held)
    chosen = rates or (SPARSE if any(isinstance(m, Sparse24Linear) for m in layers.values()) else DENSE)
    with _restored_on_error(model, layers) as restore:
        done = distil(model, source, rows, steps=steps, batch=batch, rates=chosen, deadline=start + 60 * minutes, progress=progress)
        after = _kl(model, source, held)
        kept = after < before
        if not kept:
            restore()
    result = Recovery(before, after, kept, done.steps, done.tokens, time.monotonic() - start, described, done.slow)
    add_notes(model, [str(result)])
    if progress:
        print(result)
    return result


def _rows(source: Any, text: Tensor | None, own_text: bool | int, until: float = math.inf, wanted: float = math.inf) -> tuple[Tensor, str]:
    """``(int64 [rows, T], what they are in words)``. The source writes ``until`` (``time.monotonic()``); on a GPU no more than ``wanted`` rows."""
    found, said = [], []
    if text is not None:
        if not isinstance(text, Tensor) or text.dim() != 2 or text.is_floating_point() or text.shape[1] < 2 or not len(text):
            value = f"{text.dtype} {tuple(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
            raise ShapeError("recover takes rows of tokens", value=value, limit="int64 [rows, T], T >= 2", remedy="Cut the text into rows of one length.")
        limit = self_calibration.positions(source)
        if limit is not None and text.shape[1] > limit:
            raise ShapeError("rows are longer than the model has positions", value=text.shape[1], limit=f"<= {limit}", remedy="Cut them shorter.")
        found.append(text.long().cpu())
        said.append(f"{text.numel()} given tokens")
    if own_text or text is None:
        own = text_of(source, own_text, until, wanted, TOKENS if text is None else text.shape[1])
        found.append(own)
        said.append(f"{own.numel()} tokens that the source wrote itself")
    width = min(t.shape[1] for t in found)
    rows = torch.cat([t[:, :width] for t in found])
    if len(rows) < 2 * _HELD_OUT:
        raise ShapeError("too little text", value=f"{len(rows)} rows", limit=f">= {2 * _HELD_OUT} rows", remedy="Give more or shorter rows, or own_text=True.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))
    return rows[order], " and ".join(said)


def text_of(source: Any, asked: bool | int, until: float, wanted: float = math.inf, length: int = TOKENS) -> Tensor:
    """int64 ``[rows, length]`` that the source writes; half of them begin with any token. At least one part is written, and none that would not end in time."""
    at_once, count = self_calibration.AT_ONCE, SEQUENCES
    if next(source.parameters()).device.type == "cuda":
        count = int(min(_SEQUENCES_GPU, max(SEQUENCES, wanted)))
        if self_calibration.is_quick(source):
            at_once = _AT_ONCE
    tokens = count * TOKENS if isinstance(asked, bool) else asked
    rows = max(2 * _HELD_OUT, tokens // length)
    written = self_calibration.write(source, rows, length, random_first=rows // 2, seed=SEED, at_once=at_once, until=until, likeliest=self_calibration.ALL)
    return written[0]["input_ids"].cpu()  # type: ignore[union-attr]


def wanted_rows(steps: int | None, batch: int | None) -> float:
    """How many rows of text no step would see twice."""
    return math.inf if steps is None else steps * (batch or BATCH_GPU) + _HELD_OUT_ROWS


def _kl(model: nn.Module, source: nn.Module, rows: Tensor) -> float:
    """KL(source || model) in nats a token over all positions of ``rows``. :func:`evaluate` wants a token behind each row, which the KL does not depend on."""
    return evaluate(model, F.pad(rows, (0, 1)), reference=source).kl or 0.0


def _held_out(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What is measured on, and what is trained on."""
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[::_HELD_OUT][:_HELD_OUT_ROWS] = True
    return rows[held], rows[~held]


@contextmanager
def _restored_on_error(model: nn.Module, layers: dict[str, FP4Linear]) -> Iterator[Callable[[], None]]:
    """Gives a function that puts everything back that is trained; it is called, too, if the block ends with an error."""
    parts = {name: tuple(t.clone() for t in m.parts()) for name, m in layers.items()}
    biases = {name: m.bias.detach().clone() for name, m in layers.items() if m.bias is not None}
    rest = {p: p.detach().clone() for p in unquantized(model, layers)}
    flags = {p: p.requires_grad for p in model.parameters()}

    def restore() -> None:
        with torch.no_grad():
            for name, layer in layers.items():
                write_parts(layer, parts[name])
                if name in biases and layer.bias is not None:
                    layer.bias.copy_(biases[name])
            for p, value in rest.items():
                p.copy_(value)

    try:
        yield restore
    except BaseException:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        restore()
        raise
    finally:
        for p, flag in flags.items():
            p.requires_grad_(flag)
