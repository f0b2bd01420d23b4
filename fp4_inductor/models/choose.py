"""Which layers become sparse under a budget: the cheapest first, by what each one costs the model's output on its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import Sparse24Config
from ..errors import ConfigError
from ..formats import nvfp4, sparse24
from .calibrate import evaluating
from .chain import Chain, recording, skipping
from .probe import Probe
from .progress import bar


@dataclass
class Candidate:
    """A weight as it would be in FP4.

    Args:
        name: of the layer, or of the weight of a module of experts.
        parameter: the dense weight.
        dense: gives the quantized one, in the layout of ``parameter``.
        error: relative output error.
        alone: no other layer has this Parameter.
        cost: KL of the model with it alone.
    """

    name: str
    parameter: nn.Parameter
    dense: Callable[[], Tensor]
    error: float = 0.0
    alone: bool = True
    cost: float = 0.0

    @property
    def weights(self) -> int:
        return self.parameter.numel()

    def put(self) -> Tensor:
        """Into the Parameter, rounded to its dtype; returns what was there."""
        old = self.parameter.data
        self.parameter.data = self.dense().to(old.device, old.dtype)
        return old


def choose(
    found: list[Candidate], dense: list[Candidate], config: Sparse24Config, probe: Probe | None, model: nn.Module, chain: Chain, progress: bool
) -> set[str]:
    """Names of the layers to be sparse under ``config``'s budget. The model's weights are as before when this returns.

    Args:
        found: layers that may be sparse, as they would be.
        dense: all layers, as they would be in dense NVFP4; needed for ``max_kl``.

    Raises:
        ConfigError: dense NVFP4 alone costs more than ``max_kl``.
    """
    if config.max_error is not None:
        return {c.name for c in found if c.error <= config.max_error}
    ranked = rank(found, probe, model, chain, progress)
    if config.bits is not None:
        return {c.name for c in ranked[: needed(ranked, config.bits, sum(c.weights for c in dense))]}
    if config.max_kl is None or probe is None:
        return {c.name for c in ranked}
    low, high = 0, len(ranked)  # the longest prefix within max_kl, supposing that KL grows with it
    floor = together(dense, probe, model)
    if floor > config.max_kl:
        raise ConfigError(
            "max_kl is less than dense NVFP4 costs; nothing was changed",
            value=config.max_kl,
            limit=f">= {floor:.4f} for this model on these batches",
            remedy="Allow more, or leave costly layers in high precision (ignore=[...]).",
        )
    while low < high:
        middle = (low + high + 1) // 2
        sparse = {c.name: c for c in ranked[:middle]}
        if together([sparse.get(c.name, c) for c in dense], probe, model) <= config.max_kl:
            low = middle
        else:
            high = middle - 1
    return {c.name for c in ranked[:low]}


def needed(ranked: list[Candidate], bits: float, total: int) -> int:
    """How many of ``ranked`` must be sparse for a mean of at most ``bits`` over ``total`` weights; all, if that is not enough."""
    saved, count = 0.0, 0
    wanted = (nvfp4.BITS_PER_WEIGHT - bits) * total
    while saved < wanted * (1 - 1e-9) and count < len(ranked):
        saved += ranked[count].weights * (nvfp4.BITS_PER_WEIGHT - sparse24.BITS_PER_WEIGHT)
        count += 1
    return count


def rank(found: list[Candidate], probe: Probe | None, model: nn.Module, chain: Chain, progress: bool) -> list[Candidate]:
    """``found`` by cost per weight, cheapest first: KL with that layer alone replaced; its squared error if KL cannot be measured."""
    if probe is None or not probe.usable:
        for c in found:
            c.cost = c.error**2 * c.weights
        return sorted(found, key=lambda c: c.cost / c.weights)
    blocks, inputs = _block_inputs(model, chain, probe)
    for c in bar(found, "measure (to choose)", "layer", progress):
        index = blocks.block_of(c.name) if inputs and c.alone else None
        skip = nullcontext() if not index else skipping(blocks, index, inputs[index])
        dense = c.put()
        try:
            with skip:
                c.cost = max(probe.kl(model, 0), 0.0)
        finally:
            c.parameter.data = dense
    return sorted(found, key=lambda c: c.cost / c.weights)


def together(chosen: list[Candidate], probe: Probe, model: nn.Module) -> float:
    """KL with all of ``chosen`` in place at once."""
    dense: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for c in chosen:
            dense.append((c.parameter, c.put()))
        return probe.kl(model)
    finally:
        for parameter, w in dense:
            parameter.data = w


@torch.no_grad()
def _block_inputs(model: nn.Module, chain: Chain, probe: Probe) -> tuple[Chain, list[Tensor]]:
    """The chain recorded on the probe's first batch, and what each of its blocks is fed with in the dense model."""
    blocks = Chain([type(b)(b.name, b.module) for b in chain.blocks], broken=chain.broken)
    with recording(blocks), evaluating(model):
        if not blocks.broken:
            probe.run(model, 0)
    if blocks.broken:
        return blocks, []
    inputs = [blocks.hidden[0]]
    with evaluating(model):
        for b in blocks.blocks[:-1]:
            inputs.append(b(inputs[-1], 0))
    return blocks, inputs
