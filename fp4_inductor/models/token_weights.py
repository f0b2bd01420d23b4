"""How much each token of calibration text matters at each linear layer: the weights of ``H = X^T diag(v) X / rows``.

:func:`fisher` takes the squared norm of the gradient at the layer's output. On text that the model wrote itself the next token is a sample of
the model, so this is its Fisher information: to second order, what an error of that size at that token costs the output in KL. One
backward pass, through the activations only. Where none is possible, :func:`input_norms` at least takes the few tokens back whose inputs are
hundreds of times larger than all others (Sun et al., "Massive Activations in Large Language Models", 2024).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .calibrate import evaluating, feed
from .chain import Chain, without_cache
from .expert_gradients import PairWeights, squared_gradients
from .forwards import replaced_forwards
from .output_moments import OutputMoments
from .plan import ExpertsTarget, Target
from .routed import input_norms

FISHER, NORMS = "the Fisher information of the model", "the norm of their inputs"
_REACHED = 0.5  # of the layers: fewer, and something is wrong with the backward pass


class TokenWeights:
    """A :class:`.hessian.Weigh`: what :func:`fisher` found, and the norm of the inputs for layers of which it found nothing.

    Args:
        found: for each layer and batch the squared gradients float32 ``[rows]`` of each call.
        reason: why nothing was found, in words.
        experts: for each module of experts and batch what was found in each call.
        outputs: for each layer the second moments of its gradients.
    """

    def __init__(
        self,
        found: dict[str, list[list[Tensor]]] | None = None,
        reason: str = "",
        experts: dict[str, list[list[PairWeights]]] | None = None,
        outputs: dict[str, OutputMoments] | None = None,
    ):
        self.found, self.reason, self.experts, self.outputs = found or {}, reason, experts or {}, outputs or {}
        self.unknown: set[str] = set()  # layers that were asked for and not found
        self._means = {name: torch.cat([v for batch in calls for v in batch]).mean() for name, calls in self.found.items()}

    def __call__(self, name: str, batch: int, inputs: list[Tensor]) -> list[Tensor]:
        calls = self.found.get(name)
        if calls is not None and [len(v) for v in calls[batch]] == [x.shape[:-1].numel() for x in inputs]:
            return [v / self._means[name] for v in calls[batch]]
        self.unknown.add(name)
        return [input_norms(x) for x in inputs]

    def pairs(self, name: str, batch: int, calls: int) -> list[PairWeights] | list[None]:
        found = self.experts.get(name)
        if found is not None and len(found[batch]) == calls:
            return found[batch]
        self.unknown.add(name)
        return [None] * calls


def described_weights(weights: TokenWeights) -> str:
    """For the report: by what the tokens of calibration text were weighted."""
    text = f"tokens weighted by {NORMS}, because {weights.reason}" if weights.reason else f"tokens weighted by {FISHER}"
    if weights.unknown and not weights.reason:
        names = ", ".join(sorted(weights.unknown)[:3])
        text += f" (in {len(weights.unknown)} layers that no gradient reached by {NORMS}: {names}{' ...' if len(weights.unknown) > 3 else ''})"
    return text


def fisher(
    model: nn.Module,
    targets: Sequence[Target],
    batches: Sequence[Any],
    chain: Chain,
    progress: bool,
    experts: Sequence[ExpertsTarget] = (),
    moments: Mapping[str, OutputMoments] | None = None,
) -> TokenWeights:
    """Squared gradients of the cross entropy of each next token of ``batches`` at the outputs of ``targets`` and of both products of ``experts``.

    ``moments``: by the names of layers, what their gradients are added to. The result has those of the layers that gradients reached.

    The model runs in eval mode, in its own dtype, its weights frozen; modes, flags and gradients are as before when this returns. In a chain of
    blocks each block is run a second time during the backward pass, so that only the blocks' inputs are kept.

    Never raises for what the model cannot do: the result says why it is empty.
    """
    try:
        reason = why_not(model)
        return TokenWeights(reason=reason) if reason else _backward(model, targets, experts, batches, chain, progress, moments or {})
    except Exception as error:  # whatever a model's own code raises when it meets autograd
        return TokenWeights(reason=f"the backward pass failed with {type(error).__name__}: {error}".splitlines()[0])


def why_not(model: Any) -> str | None:
    """Why there is no backward pass through ``model``; None if it can be tried."""
    can_generate = getattr(model, "can_generate", None)
    if not callable(can_generate) or not can_generate() or getattr(model.config, "is_encoder_decoder", False):
        return f"{type(model).__name__} is no causal language model of transformers"
    if not isinstance(embedding_of(model), nn.Module):
        return f"{type(model).__name__} has no input embeddings"
    return None


def embedding_of(model: Any) -> Any:
    """The module of a model of transformers that reads token ids; None: it has none."""
    getter = getattr(model, "get_input_embeddings", None)
    return getter() if callable(getter) else None


def _backward(
    model: nn.Module,
    targets: Sequence[Target],
    experts: Sequence[ExpertsTarget],
    batches: Sequence[Any],
    chain: Chain,
    progress: bool,
    moments: Mapping[str, OutputMoments],
) -> TokenWeights:
    watched: list[Target | ExpertsTarget] = [*targets, *experts]
    found: dict[str, list[list[Any]]] = {t.name: [] for t in watched}
    taken: dict[str, list[list[Any]]] = {}
    forward = [True]  # not while a block is run again

    def watch(target: Target | ExpertsTarget, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not forward[0] or not isinstance(output, Tensor) or not output.requires_grad:
            return
        slot: list[Any] = []
        taken.setdefault(target.name, []).append(slot)
        if isinstance(target, Target):
            output.register_hook(lambda g: slot.append(of_layer(target.name, g.detach().reshape(-1, g.shape[-1]).float())))
        else:
            values = [v.detach() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
            output.register_hook(lambda g: slot.append(squared_gradients(target, values, g)))

    def of_layer(name: str, g: Tensor) -> Tensor:
        if name in moments:
            moments[name].add(g)
        return g.square().sum(-1)

    handles = [t.module.register_forward_hook(partial(watch, t), with_kwargs=True) for t in watched]
    handles.append(embedding_of(model).register_forward_hook(lambda module, args, output: output.detach().requires_grad_()))
    try:
        with frozen(model), evaluating(model), torch.enable_grad(), checkpointing(chain), repeatable(model):
            outputs = feed(model, batches, progress, "weigh tokens")
            for batch in batches:
                taken.clear()
                forward[0] = True
                kwargs, output = next(outputs)
                loss = next_token_loss(batch, kwargs, output)
                if loss is None:
                    return TokenWeights(reason=f"{type(model).__name__} gave no logits for each token of input_ids")
                forward[0] = False
                loss.backward()
                del loss, output
                for name, calls in found.items():
                    # A layer whose output the loss does not see, as the last block's at padding, has no gradient.
                    calls.append([slot[0] for slot in taken.get(name, []) if slot and slot[0] is not None])
    finally:
        for handle in handles:
            handle.remove()
    usable = {name: calls for name, calls in found.items() if all(calls) and _is_usable(calls)}
    if len(usable) < _REACHED * len(found):
        return TokenWeights(reason=f"finite gradients reached only {len(usable)} of {len(found)} layers")
    names = {e.name for e in experts}
    layers = {n: c for n, c in usable.items() if n not in names}
    return TokenWeights(layers, experts={n: c for n, c in usable.items() if n in names}, outputs={n: m for n, m in moments.items() if n in layers})


def _is_usable(calls: list[list[Any]]) -> bool:
    total = sum(float((v if isinstance(v, Tensor) else v.first + v.down).sum()) for batch in calls for v in batch)
    return 0.0 < total < float("inf")


def next_token_loss(batch: Any, kwargs: dict[str, Any], output: Any) -> Tensor | None:
    """Summed cross entropy in nats of each token of ``batch`` that follows another, padding left out; None without logits, or token ids of theirs."""
    logits = getattr(output, "logits", output.get("logits") if isinstance(output, Mapping) else None)
    ids = kwargs.get("input_ids")
    if ids is None and not isinstance(batch, Mapping):
        ids = batch if isinstance(batch, Tensor) else next(iter(batch), None)
    if not isinstance(logits, Tensor) or not isinstance(ids, Tensor) or ids.is_floating_point() or logits.shape[:-1] != ids.shape:
        return None
    labels = ids.to(logits.device).long()
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        labels = labels.masked_fill(mask.to(logits.device) == 0, -100)
    return F.cross_entropy(logits[..., :-1, :].float().flatten(0, -2), labels[..., 1:].flatten(), reduction="sum")


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No Parameter requires a gradient while this is active."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


@contextmanager
def checkpointing(chain: Chain) -> Iterator[None]:
    """While active, the blocks of ``chain`` keep only their inputs for the backward pass, and run again when it needs more."""
    blocks = [] if chain.broken else [b.module for b in chain.blocks]

    def through(forward: Any, *args: Any, **kwargs: Any) -> Any:
        # Without the cache, which a second run would fill a second time.
        args, kwargs = tuple(map(without_cache, args)), {k: without_cache(v) for k, v in kwargs.items()}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    with replaced_forwards() as replace:
        for module in blocks:
            replace(module, partial(through, module.forward))
        yield


@contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """While active, backward passes on CUDA add in one order where they can (attention has a choice), as they do on a CPU."""
    if not any(p.device.type == "cuda" for p in model.parameters()):
        yield
        return
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            # An operator that has no such way runs as it is, and would warn each time.
            warnings.filterwarnings("ignore", message="(?i).*deterministic")
            torch.use_deterministic_algorithms(True, warn_only=True)
            deterministic.fill_uninitialized_memory = False  # nothing here is read before it is written
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = filled
