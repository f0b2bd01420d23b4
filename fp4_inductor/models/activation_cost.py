"""What rounding the activations costs a model quantized with ``prefill="nvfp4"``, beside what its weights cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import QualityWarning
from ..modules import FP4Linear
from .probe import LOUD_KL, Probe

_ELSEWHERE = "SmolLM2-135M: KL 0.09 -> 0.26 nats a token, perplexity x1.07 -> x1.27"  # benchmarks/results/quality_smollm2.csv
_WHERE = 'prefill="nvfp4": few rows, experts and the output head keep their activations'


def activation_cost(model: nn.Module, probe: Probe | None) -> tuple[float | None, list[str], list[str]]:
    """``(KL from the dense model or None, notes, warnings)`` for the report of a model just quantized.

    Args:
        probe: of the dense model, over calibration batches; None: there were none.
    """
    if probe is None or not probe.usable:
        why = "no calibration data" if probe is None else "a model without logits"
        return None, [f"{_WHERE}; its cost was not measured: {why} ({_ELSEWHERE})"], []
    kl = probe.kl(model)
    with _activations_kept(model):
        weights = probe.kl(model)
    notes = [f"{_WHERE}; KL from the dense model {kl:.4f} nats a token on calibration batches, {weights:.4f} of it from the weights"]
    if kl <= LOUD_KL:
        return kl, notes, []
    text = (
        f"NVFP4 weights and activations cost {kl:.2f} nats a token against the dense model (perplexity about x{math.exp(kl):.1f} on such text), "
        f'the weights alone {weights:.2f}: prefill="auto" keeps the activations'
    )
    warnings.warn(text, QualityWarning, stacklevel=5)
    return kl, notes, [text]


@contextmanager
def _activations_kept(model: nn.Module) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, FP4Linear) and m.prefill == "nvfp4"]
    for layer in layers:
        layer.prefill = "bf16"
    try:
        yield
    finally:
        for layer in layers:
            layer.prefill = "nvfp4"
