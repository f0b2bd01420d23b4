"""Where the KL divergence of a quantized model from its source comes from: the share of each layer, predicted by one backward pass.

A small error ``e[t]`` at a layer's output for token t changes the distribution of what follows by a KL of half its quadratic form with the
Fisher information, ``E[(g[t] . e[t])^2] / 2``, where ``g[t]`` is the gradient of ``-log p`` of a token that the model itself draws. What the
layers' errors do together, and the tokens' errors, is left out: shares say which layer to look at, the measured KL says what all cost.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..modules import FP4Experts, FP4Linear
from .calibrate import evaluating
from .progress import bar
from .token_weights import embedding_of, frozen, repeatable, why_not

_SEED = 0


@dataclass(frozen=True)
class LayerShare:
    """One quantized layer, or module of experts.

    Args:
        name: dotted module name.
        kl: predicted KL in nats a token that this layer alone causes.
        share: of the sum over all layers, 0 to 1.
        output_error: ``|y - y0| / |y0|`` of its outputs, its inputs being those of the source.
    """

    name: str
    kl: float
    share: float
    output_error: float


@dataclass
class _Sums:
    quadratic: float = 0.0
    error: float = 0.0
    size: float = 0.0


class Beside(nn.Module):
    """``layer``, wherever it is, for inputs of another device: on a GPU, if one of both is there. What waits on the CPU is there again afterwards."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        device = next(self.layer.buffers()).device
        given = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), device)
        if device.type == "cpu" and given.type != "cpu":
            there = {n: t.to(given) for n, t in [*self.layer.named_buffers(), *self.layer.named_parameters()]}
            return functional_call(self.layer, there, args, kwargs)
        moved = [a.to(device) if isinstance(a, Tensor) else a for a in args]
        return self.layer(*moved, **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()})


def layer_shares(model: nn.Module, reference: nn.Module, windows: Tensor, *, progress: bool = False) -> tuple[list[LayerShare], list[str]]:
    """``(shares, notes)``: the largest share first; no shares, and the reason in a note, where no backward pass is possible.

    Args:
        model: the quantized model. Only its layers are run, each on what the layer of that name in ``reference`` is fed with.
        reference: its source, on the same device.
        windows: int64 ``[W, T + 1]``; the last token of each is not used.
    """
    quantized = {name: m for name, m in model.named_modules() if isinstance(m, (FP4Linear, FP4Experts))}
    there = dict(reference.named_modules())
    missing = sorted(name for name in quantized if name not in there)
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {name: (m, there[name]) for name, m in quantized.items() if name in there}
    notes = [f"{len(missing)} layers have no counterpart in the source: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"] if missing else []
    shares, more = shares_of(pairs, reference, windows, progress=progress)
    return shares, notes + more


def shares_of(
    pairs: dict[str, tuple[nn.Module, nn.Module]], reference: nn.Module, windows: Tensor, *, progress: bool = False
) -> tuple[list[LayerShare], list[str]]:
    """As :func:`layer_shares`, of ``{name: (quantized layer, the module of reference that it stands for)}``."""
    notes: list[str] = []
    reason = why_not(reference)
    if reason is not None:
        return [], [f"no shares of layers, because {reason}"]
    try:
        sums = _sums(pairs, reference, windows, progress)
    except Exception as error:  # whatever a model's own code raises when it meets autograd
        return [], [f"no shares of layers, because the backward pass failed with {type(error).__name__}: {error}".splitlines()[0]]
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    kl = {name: s.quadratic / 2 / tokens for name, s in sums.items()}
    total = sum(kl.values())
    unreached = [name for name in pairs if name not in sums]
    if unreached:
        notes.append(f"{len(unreached)} layers were not reached: {', '.join(unreached[:3])}{' ...' if len(unreached) > 3 else ''}")
    found = [LayerShare(n, kl[n], kl[n] / total if total else 0.0, math.sqrt(s.error / s.size) if s.size else 0.0) for n, s in sums.items()]
    return sorted(found, key=lambda s: -s.kl), notes


def _sums(pairs: dict[str, tuple[nn.Module, nn.Module]], reference: Any, windows: Tensor, progress: bool) -> dict[str, _Sums]:
    sums: dict[str, _Sums] = {}

    def watch(name: str, layer: nn.Module, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        with torch.no_grad():
            error = (layer(*args, **kwargs).reshape(output.shape).to(output.device).float() - output.float()).detach()
        entry = sums.setdefault(name, _Sums())
        entry.error += float(error.square().sum())
        entry.size += float(output.detach().float().square().sum())
        output.register_hook(lambda g: _add(entry, g, error))

    handles = [theirs.register_forward_hook(partial(watch, name, ours), with_kwargs=True) for name, (ours, theirs) in pairs.items()]
    handles.append(embedding_of(reference).register_forward_hook(lambda module, args, output: output.detach().requires_grad_()))
    try:
        with ExitStack() as stack:
            for context in (*(evaluating(ours) for ours, _ in pairs.values()), frozen(reference), evaluating(reference)):
                stack.enter_context(context)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(repeatable(reference))
            device = next(reference.parameters()).device
            generator = torch.Generator(device).manual_seed(_SEED)
            for row in bar(windows, "shares of layers", "window", progress):
                logits = reference(input_ids=row[None, :-1].to(device), use_cache=False).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
                F.cross_entropy(logits, drawn, reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _add(entry: _Sums, gradient: Tensor, error: Tensor) -> None:
    entry.quadratic += float((gradient.float() * error).sum(-1).square().sum())
