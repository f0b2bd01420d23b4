"""``recover``: a quantized model trained to predict what its source predicts, by what costs nothing when it runs.

Codes (E2M1, straight through the rounding), block scales (E4M3), biases and norms move; the format, the global scales and the pattern of 2:4
weights stay. The loss is the KL divergence of the next token's distribution from the source's (distillation), on text that the source writes
and text that is given.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError, NonFiniteError, ShapeError
from ..modules import FP4Linear, FP8Linear, Sparse24Linear
from . import self_calibration
from .calibrate import evaluating
from .chain import find_chain
from .coverage import add_notes
from .plan import Target, tensor_key
from .probe import Probe
from .progress import bar
from .token_weights import checkpointing, repeatable
from .trainable import Trainable, write_parts

SEQUENCES, TOKENS = 256, 256  # of the text that the source writes
_HELD_OUT = 8  # one row in so many is measured on, and not trained on
_SEED = 2  # not that of text to calibrate on, or to verify with
_POSITIONS = 512  # whose logits are compared at once
_LARGE = 1_000_000_000  # weights from which a block keeps only its input for the backward pass
_WARM_UP = 0.1  # of the steps: the rate rises


@dataclass(frozen=True)
class Rates:
    """Steps of Adam. ``values`` in units of a layer's root mean square, ``scales`` in powers of two, ``rest`` (biases, norms) of their root mean square."""

    values: float
    scales: float
    rest: float


# austen_dense, 60 steps of 2,048 tokens of its own text, from "activation" with a KL of 0.0140 on a novel: 0.0104; values by 5e-4: 0.0127, by 5e-3: 0.0107;
# scales, biases and norms alone: 0.0134. (Then values whose code is not the nearest started at its edge, which lost what "gptq" had gained:
# SmolLM2 rose from 0.056 to 0.082 in 12 steps. They start at their code now.)
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
    """

    kl_before: float
    kl_after: float
    kept: bool
    steps: int
    tokens: int
    seconds: float
    text: str

    def __str__(self) -> str:
        verdict = "" if self.kept else "; no gain: the model is as it was"
        return (
            f"recovered by {self.steps} steps ({self.tokens} tokens) on {self.text} in {self.seconds:.0f} s: "
            f"KL from the source on held-out rows {self.kl_before:.4f} -> {self.kl_after:.4f} nats a token{verdict}"
        )


def recover(
    model: nn.Module,
    source: nn.Module,
    text: Tensor | None = None,
    *,
    own_text: bool = True,
    steps: int = 400,
    minutes: float = 15.0,
    batch: int = 8,
    rates: Rates | None = None,
    progress: bool = True,
) -> Recovery:
    """Train a quantized language model to predict what its source predicts. In place, and only if that lowers the KL on held-out text.

    Trained are the codes and block scales of quantized linear layers, dense and 2:4-sparse (whose pattern stays), their biases, and norms: what
    costs nothing at run time. Experts, the output head and layers that share one weight stay as they are. Training takes 16 bytes of memory
    for each weight that is trained, besides both models.

    Args:
        model: quantized by :func:`fp4_inductor.quantize_model`, or loaded. After an error or Ctrl-C it is as it was.
        source: the dense model that it was made from, on the same device; not changed.
        text: int64 ``[rows, T]``: tokens to train on; None: only what ``source`` writes. Text like that which the model will see is best.
        own_text: False: ``text`` alone.
        steps, minutes: whichever ends first; the schedule of the rate knows both.
        batch: rows of a step.
        rates: of Adam; None: those for dense, or for 2:4-sparse layers.
        progress: show a progress bar, and print the result.

    Returns:
        :class:`Recovery`; the model's report has it as a note.

    Raises:
        ConfigError: nothing to train; ShapeError: no such text; CalibrationError: ``source`` cannot write; NonFiniteError: the loss is not finite.
    """
    start = time.monotonic()
    if model is source or steps < 1 or batch < 1 or not minutes > 0:
        raise ConfigError(
            "recover takes a quantized model, its source, and time to train",
            value=f"model is source: {model is source}, steps={steps}, batch={batch}, minutes={minutes}",
            limit="two models, steps >= 1, batch >= 1, minutes > 0",
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
    rows, described = _rows(source, text, own_text)
    held, rows = rows[::_HELD_OUT], torch.cat([rows[i::_HELD_OUT] for i in range(1, _HELD_OUT)])
    probe = Probe(source, [{"input_ids": part, "use_cache": False} for part in held.split(max(1, 1024 // held.shape[1]))])
    if not probe.usable:
        raise ConfigError("recover needs logits", value=type(source).__name__, limit="output.logits", remedy="Recover a model with a language head.")
    before = probe.kl(model)
    chosen = rates or (SPARSE if any(isinstance(m, Sparse24Linear) for m in layers.values()) else DENSE)
    with _restored_on_error(model, layers) as restore:
        done = distil(model, source, rows, steps=steps, batch=batch, rates=chosen, deadline=start + 60 * minutes, progress=progress)
        after = probe.kl(model)
        kept = after < before
        if not kept:
            restore()
    result = Recovery(before, after, kept, done, done * min(batch, len(rows)) * rows.shape[1], time.monotonic() - start, described)
    add_notes(model, [str(result)])
    if progress:
        print(result)
    return result


def trainable_layers(model: nn.Module) -> dict[str, FP4Linear]:
    """The quantized linear layers in NVFP4, dense or sparse, by name; without heads, and without those that share a weight."""
    named = {n: m for n, m in model.named_modules() if isinstance(m, FP4Linear) and not isinstance(m, FP8Linear)}
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    owners: dict[tuple, int] = {}
    for _, m in model.named_modules(remove_duplicate=False):
        if isinstance(m, FP4Linear):
            key = tensor_key(m.parts()[0])
            owners[key] = owners.get(key, 0) + 1
    return {n: m for n, m in named.items() if m is not head and owners[tensor_key(m.parts()[0])] == 1}


def _rows(source: Any, text: Tensor | None, own_text: bool) -> tuple[Tensor, str]:
    """``(int64 [rows, T], what they are in words)``."""
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
        length = TOKENS if text is None else text.shape[1]
        count = max(16, SEQUENCES * TOKENS // length)
        own: Tensor = self_calibration.write(source, count, length, random_first=count // 2, seed=_SEED)[0]["input_ids"]  # type: ignore[assignment]
        found.append(own.cpu())
        said.append(f"{own.numel()} tokens that the source wrote itself")
    width = min(t.shape[1] for t in found)
    rows = torch.cat([t[:, :width] for t in found])
    if len(rows) < 2 * _HELD_OUT:
        raise ShapeError("too little text", value=f"{len(rows)} rows", limit=f">= {2 * _HELD_OUT} rows", remedy="Give more or shorter rows, or own_text=True.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SEED))
    return rows[order], " and ".join(said)


@contextmanager
def _restored_on_error(model: nn.Module, layers: dict[str, FP4Linear]) -> Iterator[Callable[[], None]]:
    """Gives a function that puts everything back that is trained; it is called, too, if the block ends with an error."""
    parts = {name: tuple(t.clone() for t in m.parts()) for name, m in layers.items()}
    biases = {name: m.bias.detach().clone() for name, m in layers.items() if m.bias is not None}
    rest = {p: p.detach().clone() for p in _vectors(model)}
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


def _vectors(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of norms, and other vectors."""
    return [p for p in model.parameters() if p.dim() == 1 and p.numel() and p.is_floating_point()]


def distil(
    model: nn.Module, source: nn.Module, rows: Tensor, *, steps: int, batch: int, rates: Rates, deadline: float = math.inf, progress: bool = False
) -> int:
    """Train ``model`` in place on rows of tokens ``[rows, T]``; returns the steps done before ``deadline`` (``time.monotonic()``).

    Raises:
        NonFiniteError: the loss is not finite. The model is left as training had it.
    """
    layers = trainable_layers(model)
    originals = dict(source.named_modules())
    for p in model.parameters():
        p.requires_grad_(False)
    trained: list[Trainable] = []
    for name, layer in layers.items():
        weight = getattr(originals.get(name), "weight", None)
        dense = weight if isinstance(weight, Tensor) and tuple(weight.shape) == (layer.out_features, layer.in_features) else None
        trained.append(Trainable(layer, None if isinstance(layer, Sparse24Linear) else dense))
        model.set_submodule(name, trained[-1])
    vectors = _vectors(model) if rates.rest else []
    vectors = [p for p in vectors if not any(p is m.bias for m in trained)]
    masters = [p.detach().float().clone() for p in vectors]
    groups = [{"params": [m.values], "rate": rates.values * _size(m.values, m.mask)} for m in trained]
    groups += [{"params": [m.log_scale], "rate": rates.scales} for m in trained]
    groups += [{"params": [m.bias], "rate": rates.rest * _size(m.bias)} for m in trained if m.bias is not None and rates.rest]
    groups += [{"params": [t], "rate": rates.rest * _size(t)} for t in masters]
    optimizer = torch.optim.Adam([g for g in groups if g["rate"]], lr=0.0, betas=(0.9, 0.95))
    for p in vectors:
        p.requires_grad_(True)
    # More rows than there are would be the same row twice.
    batch = min(batch, len(rows))
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(-(-steps * batch // len(rows)))])
    weights = sum(m.values.numel() for m in trained)
    chain = find_chain(model, [Target((n,), m) for n, m in zip(layers, trained, strict=True)])
    if weights < _LARGE:
        chain.broken = "small enough to keep all"
    start, done, pace = time.monotonic(), 0, 0.0
    with _evaluating_with_gradients(model), checkpointing(chain), repeatable(model):
        for step in bar(range(steps), "recover", "step", progress):
            now = time.monotonic()
            if now + pace > deadline:
                break
            # If time is what ends it, the rate must reach zero by then all the same.
            fraction = max(step / steps, (now - start) / max(deadline - start, 1e-9))
            rate = min(1.0, max((step + 1) * _WARM_UP, fraction / _WARM_UP)) * 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * rate
            x = rows[order[step * batch : (step + 1) * batch]].to(next(source.parameters()).device)
            loss = _loss(model, source, x)
            if not math.isfinite(loss):
                raise NonFiniteError("the loss is not finite", value=f"{loss} at step {step}", limit="finite", remedy="Lower the rates, or check the model.")
            for p, master in zip(vectors, masters, strict=True):
                master.grad, p.grad = None if p.grad is None else p.grad.float(), None
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for p, master in zip(vectors, masters, strict=True):
                    p.copy_(master)
            done, pace = step + 1, (time.monotonic() - start) / (step + 1)
    for name, module in zip(layers, trained, strict=True):
        model.set_submodule(name, module.pack())
    return done


def _size(t: Tensor, mask: Tensor | None = None) -> float:
    """Root mean square of what ``mask`` keeps; a step is relative to the size of what it moves."""
    count = t.numel() if mask is None else int(mask.sum())
    return float((t.detach().float().square().sum() / max(count, 1)).sqrt()) or 1.0


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    with evaluating(model), torch.enable_grad():
        yield


def _loss(model: nn.Module, source: Any, x: Tensor) -> float:
    """KL in nats a token of the rows ``x``; its gradients are added to the Parameters'."""
    with evaluating(source):
        wanted = source(input_ids=x, use_cache=False).logits.flatten(0, 1)
    got = model(input_ids=x, use_cache=False).logits.flatten(0, 1)
    # Part by part: in float32 the logits of all would be the largest thing in memory.
    total = sum(checkpoint(_divergence, p, q, use_reentrant=False) for p, q in zip(got.split(_POSITIONS), wanted.split(_POSITIONS), strict=True))
    loss: Tensor = total / len(got)  # type: ignore[assignment, operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()
    return float(loss.detach())


def _divergence(got: Tensor, wanted: Tensor) -> Tensor:
    return F.kl_div(got.float().log_softmax(-1), wanted.float().log_softmax(-1), log_target=True, reduction="sum")
