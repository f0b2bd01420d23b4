"""``evaluate``: how well a language model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ShapeError
from .calibrate import evaluating
from .progress import bar

_ROWS = 256  # positions whose log probabilities are in memory at once
_TOKENS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` measured.

    Args:
        positions: tokens that were predicted.
        non_finite: positions whose logits hold NaN or Inf. The other figures are NaN if there are any.
        nats: mean of ``-log p(next token)``, in nats.
        kl: mean of KL(reference || model) over the positions, in nats; None without a reference.
        agreement: share of the positions where both models find the same token most likely; None without a reference.
    """

    positions: int
    non_finite: int
    nats: float
    kl: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        """``exp(nats)``."""
        return math.inf if self.nats > 700 else math.exp(self.nats)  # exp(710) overflows; NaN stays NaN


def windows_of(ids: Sequence[int] | Tensor, count: int, length: int = 512) -> Tensor:
    """The first ``count`` windows of a text: int64 ``[count, length + 1]``, each with the token behind it.

    Args:
        ids: tokens of the text.
        count: how many windows; fewer if the text ends before, and one shorter one if it is shorter than a window.
        length: predicted tokens of a window.

    Raises:
        ShapeError: fewer than two tokens, or no positive count and length.
    """
    tokens = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    if count < 1 or length < 1:
        raise ShapeError("no window to evaluate", value=f"{count} windows of {length}", limit=">= 1 of each", remedy="Ask for one window or more.")
    if len(tokens) < 2:
        raise ShapeError("the text is too short", value=f"{len(tokens)} tokens", limit=">= 2, one of them to predict", remedy="Give a longer text.")
    length = min(length, len(tokens) - 1)
    count = min(count, (len(tokens) - 1) // length)
    return torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])


def predictions(model: nn.Module, windows: Tensor, *, progress: bool = False) -> list[Tensor]:
    """The logits ``[T, vocabulary]`` of each window, on the CPU and in the model's dtype: a reference for :func:`evaluate` that
    outlives its model.

    Args:
        model, windows, progress: as for :func:`evaluate`.

    Raises:
        As :func:`evaluate`.
    """
    with evaluating(model):
        return [_logits(model, row).cpu() for row in bar(_checked(windows), "reference", "window", progress)]


def evaluate(
    model: nn.Module | Sequence[Tensor], windows: Tensor, *, reference: nn.Module | Sequence[Tensor] | None = None, progress: bool = False
) -> Evaluation:
    """Run a causal language model over windows of a text and measure its predictions.

    Args:
        model: takes ``input_ids`` ``[1, T]`` and returns ``.logits`` ``[1, T, vocabulary]``. It runs in eval mode where it is. Or what
            :func:`predictions` gave for one.
        windows: int64 ``[W, T + 1]``: T tokens and, for each of them, its successor (:func:`windows_of`).
        reference: another model of the same vocabulary, or what :func:`predictions` gave for one: KL is measured against it.
        progress: show a progress bar.

    Returns:
        :class:`Evaluation`; arithmetic in float32.

    Raises:
        ShapeError: no such windows, or a reference of another vocabulary or other windows. ConfigError: a model whose forward fails
            on tokens, or has no logits.
    """
    windows = _checked(windows)
    nats = kl = 0.0
    agree = bad = 0
    with ExitStack() as modes:
        get, other = (_source(m, windows, modes) for m in (model, reference))
        for i, row in enumerate(bar(windows, "evaluate", "window", progress)):
            logits = get(i)
            against = None if reference is None else other(i)
            if against is not None and against.shape != logits.shape:
                raise ShapeError(
                    "the models predict different things",
                    value=f"logits {tuple(logits.shape)}",
                    limit=f"{tuple(against.shape)}, as those of the reference",
                    remedy="Compare models of one vocabulary.",
                )
            bad += int((~torch.isfinite(logits)).any(-1).sum())
            for at in range(0, len(logits), _ROWS):
                log_p = logits[at : at + _ROWS].float().log_softmax(-1)
                nats += float(F.nll_loss(log_p, row[1:][at : at + _ROWS].to(log_p.device), reduction="sum"))
                if against is not None:
                    log_q = against[at : at + _ROWS].to(log_p.device).float().log_softmax(-1)
                    kl += float(F.kl_div(log_p, log_q, log_target=True, reduction="sum"))
                    agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    count = windows.shape[0] * (windows.shape[1] - 1)
    figures = [nats / count, kl / count, agree / count] if not bad else [math.nan] * 3
    return Evaluation(count, bad, figures[0], *(figures[1:] if reference is not None else ()))


def _source(model: nn.Module | Sequence[Tensor] | None, windows: Tensor, modes: ExitStack) -> Callable[[int], Tensor]:
    """The logits of window i. ``modes``: holds a model in eval mode."""
    if isinstance(model, Sequence):
        if len(model) != len(windows):
            raise ShapeError("these predictions are of other windows", value=len(model), limit=f"{len(windows)} windows", remedy="Compute them for these.")
        return lambda i: model[i]
    if model is not None:
        modes.enter_context(evaluating(model))
    return lambda i: _logits(cast(nn.Module, model), windows[i])


def _checked(windows: Tensor) -> Tensor:
    if not isinstance(windows, Tensor) or windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < 2 or windows.dtype not in _TOKENS:
        value = f"{windows.dtype} {tuple(windows.shape)}" if isinstance(windows, Tensor) else type(windows).__name__
        raise ShapeError("evaluate takes windows of tokens", value=value, limit="int64 [W, T + 1], T >= 1", remedy="Make them with windows_of(tokens, count).")
    return windows


def _logits(model: nn.Module, row: Tensor) -> Tensor:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        output = model(input_ids=row[None, :-1].to(device), use_cache=False)
        logits = output.logits[0]
        correct = logits.dim() == 2 and len(logits) == len(row) - 1 and int(row.max()) < logits.shape[1]
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} does not predict tokens",
            value=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            limit="a causal language model: input_ids [1, T] in, logits [1, T, vocabulary] out",
            remedy="Evaluate a model with a language head, on tokens of its own tokenizer.",
        ) from error
    if not correct:
        raise ShapeError(
            f"{type(model).__name__}'s logits are not those of these tokens",
            value=f"logits {tuple(logits.shape)}, tokens up to {int(row.max())}",
            limit=f"[{len(row) - 1}, more than the largest token]",
            remedy="Use the model's own tokenizer.",
        )
    return logits
