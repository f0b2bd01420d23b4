"""The training loop of ``recover``: a quantized model learns to predict what its source predicts.

A step is thousands of small launches. On a GPU the rounding of a layer's weight is compiled into one kernel each way, so are the blocks of a model that is
small enough to keep all their results, and a step is captured as a CUDA graph.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._replay import Host, Runner, device_for
from ..decoding import attention
from ..errors import NonFiniteError
from ..modules import FP4Linear, FP8Linear, Sparse24Linear
from .calibrate import evaluating
from .chain import find_chain
from .compiled_blocks import compiled_blocks
from .plan import Target, tensor_key
from .progress import bar
from .token_weights import checkpointing, repeatable
from .trainable import Trainable, compiled_rounding, root_mean_square

SEED = 2  # not that of text to calibrate on, or to verify with
_BATCH, _BATCH_LARGE, BATCH_GPU = 8, 32, 64  # rows of a step: on a CPU, of a large model on a GPU, of a small one
_POSITIONS = 512  # whose logits are compared at once
LARGE = 1_000_000_000  # weights from which a block keeps only its input for the backward pass
_WARM_UP = 0.1  # of the steps: the rate rises
# More steps than that are smaller ones: under a rate that stays the loss stays, too, and lower under a lower rate. SmolLM2: at 1,300 steps 0.4 of the rate is
# better than 0.15 and than 1, and 5,400 steps of 0.15 are better than all of these (benchmarks/results/quality_recover_smollm2.csv).
_WHOLE_STEPS, _SHRINK = 500, 0.8
_Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rates:
    """Steps of Adam. ``values`` in units of a layer's root mean square, ``scales`` in powers of two, ``rest`` (biases, norms) of their root mean square."""

    values: float
    scales: float
    rest: float


@dataclass(frozen=True)
class Distilled:
    """What :func:`distil` did: steps, tokens, and why steps on a GPU were not one CUDA graph, or its rounding not one kernel; empty: they were."""

    steps: int
    tokens: int
    slow: str = ""


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


def _weights(layers: dict[str, FP4Linear]) -> int:
    return sum(m.out_features * m.in_features for m in layers.values())


def unquantized(model: nn.Module, layers: dict[str, FP4Linear]) -> list[nn.Parameter]:
    """What of ``model`` is trained as it is: weights and biases of norms, other vectors, and if ``layers`` are small the tables of its tokens."""
    found = [p for p in model.parameters() if p.dim() == 1 and p.numel() and p.is_floating_point()]
    if _weights(layers) < LARGE:
        getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        tables = [getattr(getter(), "weight", None) for getter in getters if callable(getter)]
        # One that is both, or quantized, or itself a vector, is no second time in the list.
        found += list({id(t): t for t in tables if type(t) is nn.Parameter and t.dim() == 2 and t.is_floating_point()}.values())
    return found


def distil(
    model: nn.Module,
    source: nn.Module,
    rows: Tensor,
    *,
    steps: int | None = None,
    batch: int | None = None,
    rates: Rates,
    deadline: float = math.inf,
    progress: bool = False,
) -> Distilled:
    """Train ``model`` in place on rows of tokens ``[rows, T]`` for ``steps``, or until ``deadline`` (``time.monotonic()``), whichever ends first.

    ``batch``: rows of a step; None: 8, on a GPU 64, of a billion weights or more 32.

    Raises:
        NonFiniteError: the loss is not finite. The model is left as training had it.
    """
    layers = trainable_layers(model)
    weights, originals = _weights(layers), dict(source.named_modules())
    for p in model.parameters():
        p.requires_grad_(False)
    trained: list[Trainable] = []
    for name, layer in layers.items():
        weight = getattr(originals.get(name), "weight", None)
        dense = weight if isinstance(weight, Tensor) and tuple(weight.shape) == (layer.out_features, layer.in_features) else None
        trained.append(Trainable(layer, None if isinstance(layer, Sparse24Linear) else dense))
        model.set_submodule(name, trained[-1])
    others = [p for p in unquantized(model, layers) if not any(p is m.bias for m in trained)] if rates.rest else []
    for p in others:
        p.requires_grad_(True)
    device = next(source.parameters()).device
    on_gpu = device.type == "cuda"
    # More rows than there are would be the same row twice.
    batch = min(batch or (_BATCH if not on_gpu else BATCH_GPU if weights < LARGE else _BATCH_LARGE), len(rows))
    chain = find_chain(model, [Target((n,), m) for n, m in zip(layers, trained, strict=True)])
    if weights < LARGE:
        chain.broken = "small enough to keep all"
    not_compiled = compiled_rounding(trained) if on_gpu else ""
    not_captured = "" if chain.broken or not on_gpu else f"steps are not captured: {weights / 1e9:.1f} G weights, so that blocks run again in the backward pass"
    step = _Step(model, source, trained, others, rates, not_captured, compiled=on_gpu and not not_compiled)
    with contextlib.ExitStack() as stack:
        why_not_blocks = _compile_blocks(stack, model, source, [b.name for b in chain.blocks]) if step.captures and not not_compiled else str
        start, done, pace = time.monotonic(), 0, 0.0
        stack.enter_context(_evaluating_with_gradients(model))
        stack.enter_context(checkpointing(chain))
        stack.enter_context(repeatable(model))
        for x in bar(_batches(rows, batch, steps), "recover", "step", progress, steps):
            now = time.monotonic()
            if now + pace > deadline:
                break
            # If time is what ends it, the rate must reach zero by then all the same.
            seconds = (now - start) / max(deadline - start, 1e-9)
            rate = _rate(done, min(steps or math.inf, (done + 1) / max(seconds, 1e-9)), max(done / (steps or math.inf), seconds))
            loss = step(x.to(device), rate)
            if not math.isfinite(loss):
                raise NonFiniteError("the loss is not finite", value=f"{loss} at step {done}", limit="finite", remedy="Lower the rates, or check the model.")
            done, pace = done + 1, (time.monotonic() - start) / (done + 1)
    for name, module in zip(layers, trained, strict=True):
        model.set_submodule(name, module.pack())
    return Distilled(done, done * batch * rows.shape[1], "; ".join(filter(None, (not_compiled, why_not_blocks(), step.slow))))


def _rate(done: int, steps: float, fraction: float) -> float:
    """Of the whole rate, behind ``done`` of about ``steps`` steps, when the ``fraction`` of them, or of the time, is over."""
    risen = max((done + 1) * _WARM_UP, fraction / _WARM_UP)
    return min(1.0, (_WHOLE_STEPS / steps) ** _SHRINK) * min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))


def _compile_blocks(stack: contextlib.ExitStack, model: nn.Module, source: nn.Module, names: list[str]) -> Callable[[], str]:
    """Compile the blocks ``names`` of both models as long as ``stack`` is open. Gives a function that says why something is not compiled; empty: all is."""
    if not names:
        return lambda: "blocks are not compiled: no list of blocks holds the layers"
    stack.enter_context(attention.kept(model, source))
    for m in (model, source):
        attention.use_attention_backend(m)
        others = set(attention.implementations(m).values()) - {attention.NAME}
        if others:  # whose masks in a capture are others than outside of it: another compilation, in the middle of the capture
            return lambda: f"blocks are not compiled: the attention of {type(m).__name__} is {', '.join(sorted(map(str, others)))}"
    return stack.enter_context(compiled_blocks((model, source), names))


def _batches(rows: Tensor, batch: int, steps: int | None) -> Iterator[Tensor]:
    """``[batch, T]`` each: all rows in a random order, then all of them in another one."""
    generator = torch.Generator().manual_seed(SEED)
    order, done = torch.empty(0, dtype=torch.int64), 0
    while steps is None or done < steps:
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(rows), generator=generator)])
        yield rows[order[:batch]]
        order, done = order[batch:], done + 1


class _Step:
    """One step of training: both models' predictions, gradients, Adam. On a GPU it is captured as a CUDA graph, unless ``slow`` says why not."""

    def __init__(self, model: nn.Module, source: nn.Module, trained: list[Trainable], others: list[nn.Parameter], rates: Rates, why_not: str, compiled: bool):
        self.model, self.source, self.why_not = model, source, why_not
        # They move in float32 and in units of their size, as values do.
        self.others = others + [m.bias for m in trained if m.bias is not None and rates.rest]
        self.sizes = [root_mean_square(p) for p in self.others]
        self.masters = [p.detach().float() / size for p, size in zip(self.others, self.sizes, strict=True)]
        all_ = (([m.values for m in trained], rates.values), ([m.log_scale for m in trained], rates.scales), (self.masters, rates.rest))
        moved = [(parameters, rate) for parameters, rate in all_ if parameters and rate]
        device = trained[0].values.device
        self.on_gpu = device.type == "cuda"
        self.divergence = torch.compile(_divergence, dynamic=True) if compiled else _divergence
        # A captured step reads its rates from memory.
        self.full = torch.tensor([rate for _, rate in moved], dtype=torch.float64)
        self.now = torch.zeros(len(self.full), device=device)
        self.optimizer = torch.optim.Adam(
            [{"params": parameters, "lr": self.now[i] if self.on_gpu else 0.0} for i, (parameters, _) in enumerate(moved)],
            betas=(0.9, 0.95),
            fused=self.on_gpu or None,
            capturable=self.on_gpu,
        )
        self.x, self.loss = torch.empty(0), torch.zeros((), device=device)
        self.captures = self.on_gpu and not why_not
        self.runner = Runner(Host() if why_not else device_for(device), self._run, lambda: None, lambda: self._forget)

    @property
    def slow(self) -> str:
        return self.why_not or self.runner.note or ""

    def __call__(self, x: Tensor, rate: float) -> float:
        """KL in nats a token of the rows ``x`` before the step, which is ``rate`` times the whole one."""
        if self.on_gpu:
            self.now.copy_(self.full * rate)
        else:
            for group, full in zip(self.optimizer.param_groups, self.full.tolist(), strict=True):
                group["lr"] = full * rate
        if self.x.shape != x.shape:
            self.x = torch.empty_like(x)
        self.x.copy_(x)
        self.runner()
        return float(self.loss)

    def _forget(self) -> None:
        """Gradients of a step that was recorded and did not run."""
        self.optimizer.zero_grad(set_to_none=True)
        for p in self.others:
            p.grad = None

    def _run(self) -> None:
        self.loss.copy_(_loss(self.model, self.source, self.x, self.divergence))
        for p, size, master in zip(self.others, self.sizes, self.masters, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float() * size, None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for p, size, master in zip(self.others, self.sizes, self.masters, strict=True):
                p.copy_(master * size)


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    with evaluating(model), torch.enable_grad():
        yield


def _loss(model: nn.Module, source: Any, x: Tensor, divergence: _Pair) -> Tensor:
    """KL in nats a token of the rows ``x``; its gradients are added to the Parameters'."""
    ours = all(set(attention.implementations(m).values()) == {attention.NAME} for m in (model, source))
    with attention.whole(x) if ours else contextlib.nullcontext() as mask:
        with evaluating(source):
            wanted = source(input_ids=x, attention_mask=mask, use_cache=False).logits.flatten(0, 1)
        got = model(input_ids=x, attention_mask=mask, use_cache=False).logits.flatten(0, 1)
    # Part by part: in float32 the logits of all would be the largest thing in memory.
    parts = zip(got.split(_POSITIONS), wanted.split(_POSITIONS), strict=True)
    total = sum(_Divergence.apply(p, q, divergence) for p, q in parts)
    loss: Tensor = total / len(got)  # type: ignore[assignment, operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()
    return loss.detach()


class _Divergence(torch.autograd.Function):
    """KL(``wanted`` || ``got``) in nats, summed over rows of logits. The gradient is made with it, so that nothing in float32 is kept until it is asked for."""

    @staticmethod
    def forward(ctx: Any, got: Tensor, wanted: Tensor, divergence: _Pair) -> Tensor:
        total, slope = divergence(got, wanted)
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad, None, None


def _divergence(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The sum in float32, and its gradient, which is the difference of the two distributions."""
    p, q = wanted.float().log_softmax(-1), got.float().log_softmax(-1)
    likely = p.exp()
    return (likely * (p - q)).sum(), (q.exp() - likely).to(got.dtype)
