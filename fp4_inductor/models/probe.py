"""What new weights cost a model, measured where it counts: KL of its next-token distribution from the dense model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .calibrate import evaluating, feed

_BYTES = 1 << 29  # of the dense model's log probabilities that are kept
_POSITIONS = 2048
_AT_ONCE = 256  # positions: in float32, each of the terms is larger than a model's logits
LOUD_KL = 0.15  # nats a token, from which a report warns: half as much again as calibrated NVFP4 weights cost SmolLM2-135M


class Probe:
    """The dense model's log probabilities on a few calibration batches.

    Args:
        model: still dense.
        batches: the batches to measure on; as many positions are used as fit half a gigabyte, 2,048 at most.
    """

    def __init__(self, model: nn.Module, batches: list[Any]):
        self.batches: list[Any] = []
        self._dense: list[Tensor] = []
        room = _POSITIONS
        with evaluating(model):
            for batch, logits in zip(batches, _logits(model, batches), strict=False):
                if logits is None:
                    break
                room = min(room, _BYTES // (logits.shape[-1] * torch.float32.itemsize)) if not self.batches else room
                self.batches.append(batch)
                self._dense.append(_log_probabilities(logits[:room]))
                room -= len(self._dense[-1])
                if room <= 0:
                    break

    @property
    def usable(self) -> bool:
        """Whether the model has logits to compare."""
        return bool(self._dense) and self.positions > 0

    @property
    def positions(self) -> int:
        return sum(len(p) for p in self._dense)

    def run(self, model: nn.Module, batch: int) -> None:
        """One forward pass on one of the batches."""
        for _ in feed(model, [self.batches[batch]]):
            pass

    def kl(self, model: nn.Module, batch: int | None = None) -> float:
        """KL(dense || ``model``) in nats per position; on one batch alone if ``batch`` is given."""
        chosen = range(len(self.batches)) if batch is None else (batch,)
        total, count = 0.0, 0
        with evaluating(model):
            for i, logits in zip(chosen, _logits(model, [self.batches[i] for i in chosen]), strict=True):
                if logits is None:
                    continue
                for p, q in zip(self._dense[i].split(_AT_ONCE), logits.split(_AT_ONCE), strict=False):
                    p, q = p.to(q.device), _log_probabilities(q[: len(p)])
                    total += float((p.exp() * (p - q)).sum(dtype=torch.float32))
                    count += len(p)
        return total / max(count, 1)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _logits(model: nn.Module, batches: list[Any]) -> Iterator[Tensor | None]:
    """``[positions, vocabulary]`` for each batch, padding left out; None where the model has no logits."""
    for kwargs, output in feed(model, batches):
        logits = getattr(output, "logits", output.get("logits") if isinstance(output, dict) else None)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or not logits.is_floating_point():
            yield None
            continue
        flat = logits.reshape(-1, logits.shape[-1])
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
            flat = flat[mask.reshape(-1) != 0]
        yield flat[:_POSITIONS]
